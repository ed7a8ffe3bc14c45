"""Background tasks whose failures are logged, and waiting for the first of several events."""

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
    """Owner of background tasks; ``close`` ends the unfinished ones."""

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
        """Run ``work`` now and at each beat of ``interval_s`` (``until_beat_s``), until ``close``.

        A failed run is recorded (``Failures.note``), and the next one follows.
        """

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
        """Run a task like ``keep_running``, until ``close``."""
        return self.spawn(keep_running(name, run, clock, foreseen), name)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error(
                "a task failed", extra={"task": task.get_name()}, exc_info=task.exception()
            )

    async def close(self, timeout_s: float = 0.0) -> None:
        """Give the tasks ``timeout_s`` to finish, then cancel the rest."""
        if self._tasks and timeout_s > 0:
            await asyncio.wait(set(self._tasks), timeout=timeout_s)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def in_thread_if(is_long: bool, work: Callable[[], T]) -> T:
    """Return the result of ``work``, run in a thread if it would block the loop for long."""
    return await asyncio.to_thread(work) if is_long else work()


async def outcomes(works: Sequence[Coroutine[Any, Any, T]]) -> list[T | BaseException]:
    """Return each work's result or error, run concurrently; a single work runs without a task."""
    if len(works) != 1:
        return await asyncio.gather(*works, return_exceptions=True)
    try:
        return [await works[0]]
    except Exception as error:  # noqa: BLE001 (it is the outcome)
        return [error]


async def wait_or_sleep(event: asyncio.Event, clock: Clock, timeout_s: float) -> None:
    """Wait until the event is set or ``timeout_s`` have passed on the clock."""
    await outcome_unless(event, clock.sleep(timeout_s))


async def outcome_unless(stopping: asyncio.Event, work: Awaitable[T]) -> T | None:
    """Return the result of ``work``; None if ``stopping`` is set first.

    ``work`` is then cancelled and awaited.
    """
    working, waiting = asyncio.ensure_future(work), asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait([working, waiting], return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, waiting):
            task.cancel()
        await asyncio.gather(working, waiting, return_exceptions=True)


async def wait_unless_done(stopping: asyncio.Event, tasks: Collection[asyncio.Task[Any]]) -> None:
    """Wait until ``stopping`` is set or a task is done; raise that task's error."""
    waiting = asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        waiting.cancel()


def first_error(group: BaseExceptionGroup[ErrorT]) -> ErrorT:
    """Return the first error of nested groups."""
    error = group.exceptions[0]
    return first_error(error) if isinstance(error, BaseExceptionGroup) else error
