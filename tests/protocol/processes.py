"""Processes that share one event loop, and can still be killed, frozen and cut off one by one.

A process is a context: a task made in it, or in a callback that it gets, belongs to it.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")

_owner: ContextVar[Process | None] = ContextVar("_owner", default=None)


class Trap:
    """Trap that kills its process at the next action ``kind``.

    It strikes just before the action, or after it and before the process hears of its success.
    """

    def __init__(self, kind: str, *, is_after: bool) -> None:
        self.kind = kind
        self.is_after = is_after


class Process:
    """Incarnation of a process.

    ``on_death`` is called when the process was killed or has ended by itself. ``failure`` is the
    error of its main task, if it ended with one. ``is_shaken`` is set once the process was
    disconnected or frozen for any time; its reader clears it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_alive = True
        self.is_cut = self.is_shaken = False
        self.trap: Trap | None = None
        self.failure: BaseException | None = None
        self.on_death: Callable[[], None] = _ignore
        self.on_mended: list[Callable[[], None]] = []
        self.main: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._arrived: deque[Callable[[], None]] = deque()
        self._is_running = asyncio.Event()
        self._is_running.set()
        self._context = contextvars.copy_context()
        self._context.run(_owner.set, self)

    @property
    def is_frozen(self) -> bool:
        return not self._is_running.is_set()

    # --- what it does ---

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task of this process."""
        return asyncio.get_running_loop().create_task(work, context=self._context.copy())

    def start(self, main: Coroutine[Any, Any, None]) -> None:
        """Live until ``main`` ends, or until it is killed."""
        self.main = self.spawn(main)
        self.main.add_done_callback(self._main_ended)

    def _main_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self.failure = task.exception()
        self.kill()

    def adopt(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def receive(self, callback: Callable[[], None]) -> None:
        """Something came over the network: a frozen process sees it once it runs again."""
        if not self.is_cut:
            self.do(callback)

    def do(self, callback: Callable[[], None]) -> None:
        """Something for it to do, once it runs."""
        if self.is_frozen:
            self._arrived.append(callback)
        elif self.is_alive:
            self._context.copy().run(callback)

    async def running(self) -> None:
        """Wait until the process runs: a frozen process waits, a dead one never returns."""
        await self._is_running.wait()
        if not self.is_alive:
            await asyncio.get_running_loop().create_future()

    async def passes(self, kind: str, *, is_after: bool) -> None:
        """Die at the trap of this kind, if one is set for the moment before or after the action."""
        trap = self.trap
        if trap is not None and trap.kind == kind and trap.is_after == is_after:
            self.kill()
        await self.running()

    # --- what is done to it ---

    def kill(self) -> None:
        """Not a word more."""
        if not self.is_alive:
            return
        self.is_alive = False
        self._is_running.set()
        self._arrived.clear()
        for task in list(self._tasks):
            task.cancel()
        self.on_death()

    def freeze(self) -> None:
        if self.is_alive:
            self.is_shaken = True
            self._is_running.clear()

    def thaw(self) -> None:
        self._is_running.set()
        while self._arrived and self.is_alive and not self.is_frozen:
            self._context.copy().run(self._arrived.popleft())

    def cut(self) -> None:
        """Break the process's connection."""
        self.is_cut = self.is_shaken = True

    def mend(self) -> None:
        """Restore the process's connection and notify the process."""
        if self.is_cut and self.is_alive:
            self.is_cut = False
            for callback in list(self.on_mended):
                self.receive(callback)

    async def reap(self) -> None:
        """Kill the process and wait for the end of its tasks."""
        self.kill()
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks, timeout=0.1)


def task_factory(
    loop: asyncio.AbstractEventLoop,
    work: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
    context: contextvars.Context | None = None,
) -> asyncio.Task[Any]:
    """Make a task that belongs to the process of its context."""
    task = asyncio.Task(work, loop=loop, context=context)
    owner = _owner.get() if context is None else context.get(_owner)
    if owner is not None:
        owner.adopt(task)
    return task


def _ignore() -> None:
    """Do nothing."""
