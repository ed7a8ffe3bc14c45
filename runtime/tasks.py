"""Background tasks that are never forgotten and never fail in silence, and waiting for the first of
several things."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from typing import Any, TypeVar

from millrace.runtime.clock import Clock, until_beat_s
from millrace.runtime.faults.failures import failures, keep_running

logger = logging.getLogger(__name__)

T = TypeVar("T")
ErrorT = TypeVar("ErrorT", bound=BaseException)


class Tasks:
    """Owns what it spawns until it is done; ``close`` ends what is left."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def repeat(
        self,
        work: Callable[[], Awaitable[object]],
        interval_s: float | Callable[[], float],
        clock: Clock,
        name: str,
    ) -> asyncio.Task[None]:
        """Run ``work`` now, and again at each beat of ``interval_s`` (``until_beat_s``), until
        ``close``. A run that fails is noted (``Failures.note``), and the next one counts."""

        async def run() -> None:
            while True:
                try:
                    await work()
                except Exception as error:  # noqa: BLE001 (it is noted)
                    failures().note(name, error)
                rest_s = interval_s() if callable(interval_s) else interval_s
                await clock.sleep(until_beat_s(clock, rest_s))

        return self.spawn(run(), name)

    def keep(
        self,
        run: Callable[[], Awaitable[None]],
        clock: Clock,
        name: str,
        foreseen: tuple[type[Exception], ...] = (),
    ) -> asyncio.Task[None]:
        """As ``keep_running``, until ``close``."""
        return self.spawn(keep_running(name, run, clock, foreseen), name)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error(
                "a task failed", extra={"task": task.get_name()}, exc_info=task.exception()
            )

    async def close(self, timeout_s: float = 0.0) -> None:
        """Give them ``timeout_s`` to finish, then cancel the rest."""
        if self._tasks and timeout_s > 0:
            await asyncio.wait(set(self._tasks), timeout=timeout_s)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def in_thread_if(is_long: bool, work: Callable[[], T]) -> T:
    """What ``work`` gives; in a thread if it takes long enough to hold up others."""
    return await asyncio.to_thread(work) if is_long else work()


async def outcomes(works: Sequence[Coroutine[Any, Any, T]]) -> list[T | BaseException]:
    """What each gives or raises, side by side; a single one, as most are, without a task."""
    if len(works) != 1:
        return await asyncio.gather(*works, return_exceptions=True)
    try:
        return [await works[0]]
    except Exception as error:  # noqa: BLE001 (it is the outcome)
        return [error]


async def wait_or_sleep(event: asyncio.Event, clock: Clock, timeout_s: float) -> None:
    """Until the event is set, or ``timeout_s`` have passed on the clock."""
    await outcome_unless(event, clock.sleep(timeout_s))


async def outcome_unless(stopping: asyncio.Event, work: Awaitable[T]) -> T | None:
    """The outcome of ``work``; None, with ``work`` cancelled and over, if ``stopping`` is set
    before it is done."""
    working, waiting = asyncio.ensure_future(work), asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait([working, waiting], return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, waiting):
            task.cancel()
        await asyncio.gather(working, waiting, return_exceptions=True)


async def wait_unless_done(stopping: asyncio.Event, tasks: Collection[asyncio.Task[Any]]) -> None:
    """Until ``stopping`` is set or one of the tasks is done; raises what that one failed with."""
    waiting = asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        waiting.cancel()


def first_error(group: BaseExceptionGroup[ErrorT]) -> ErrorT:
    """The first of a group's errors, of whatever groups are in it."""
    error = group.exceptions[0]
    return first_error(error) if isinstance(error, BaseExceptionGroup) else error
