"""Threads for work that must not delay a step."""

from __future__ import annotations

import collections
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Protocol

from millrace.engine.threads.choice import leave_core

Task = Callable[[], None]

_log = logging.getLogger(__name__)
_start_lock = threading.Lock()


class TaskQueue(Protocol):
    """Queue of tasks. ``get`` waits for a task; each None that was put is returned once."""

    def put(self, task: Task | None, /) -> None: ...

    def get(self) -> Task | None: ...


class TaskThreads:
    """Threads that run tasks in order of arrival, or in the order of the queue ``tasks``.

    The threads start with the first task, end with this object, and do not keep the process alive.
    Errors of a task are logged. ``stack_bytes`` 0 means the system's default stack. A higher
    ``niceness`` leaves the cores to other threads.
    """

    def __init__(
        self,
        name: str,
        count: int,
        stack_bytes: int = 0,
        niceness: int = 0,
        tasks: TaskQueue | None = None,
    ) -> None:
        self._niceness = niceness
        self._name = name
        self._count = count
        self._stack_bytes = stack_bytes
        self._tasks: TaskQueue = queue.SimpleQueue[Task | None]() if tasks is None else tasks
        self._started = False

    def submit(self, task: Task) -> None:
        """Run ``task`` soon. For one thread at a time."""
        if not self._started:
            self._started = True
            self._start()
        self._tasks.put(task)

    def _start(self) -> None:
        weakref.finalize(self, _stop, self._tasks, self._count)
        with _start_lock:
            before = threading.stack_size(self._stack_bytes)
            try:
                for number in range(self._count):
                    threading.Thread(
                        target=_run,
                        args=(self._tasks, self._niceness),
                        name=f"{self._name}-{number}",
                        daemon=True,
                    ).start()
            finally:
                threading.stack_size(before)


def _run(tasks: TaskQueue, niceness: int) -> None:
    leave_core()
    if niceness:
        # Applies to this thread alone: Linux schedules each thread by itself.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
    while (task := tasks.get()) is not None:
        try:
            task()
        except Exception:  # noqa: BLE001 (after any error the next task can run)
            _log.exception("a task of %s failed", threading.current_thread().name)
        # Release the task's data before the wait for the next one.
        del task


def _stop(tasks: TaskQueue, count: int) -> None:
    for _ in range(count):
        tasks.put(None)


class Bell:
    """Bell that any thread rings and one thread waits for, here or by polling ``fd``.

    ``fd`` is readable once the bell was rung.
    """

    def __init__(self) -> None:
        self._rung = threading.Event()
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self.fd).atexit = False

    def ring(self) -> None:
        """Ring; the reason must be visible before this call."""
        self._rung.set()
        os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """Reset the bell; look for the reasons after this call."""
        self._rung.clear()
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return  # it was not rung

    def wait(self, timeout_s: float) -> None:
        """Wait until the bell is rung, for at most ``timeout_s``."""
        self._rung.wait(timeout_s)


class FairTasks:
    """Threads that always run the next task of the owner who has used the least time.

    There are ``count`` threads. Each owner's tasks run in order of arrival. One owner has at most
    ``count`` - 1 threads at a time, and at least one, so that a thread is free for another owner's
    first task. An owner who was idle gets no credit for that time: it starts with the used time of
    the owner whose task began last.
    """

    def __init__(
        self,
        name: str,
        count: int,
        stack_bytes: int = 0,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue = FairTaskQueue(max(1, count - 1), monotonic)
        self._threads = TaskThreads(name, count, stack_bytes, tasks=self._queue)

    def submit(self, owner: str, task: Task) -> None:
        """Run ``task`` when it is the owner's turn. For one thread at a time."""
        self._threads.submit(OwnedTask(owner, task))


class OwnedTask:
    """Task, and the owner to whom its time is charged."""

    def __init__(self, owner: str, task: Task) -> None:
        self.owner = owner
        self.task = task

    def __call__(self) -> None:
        self.task()


class FairTaskQueue:
    """Queue of waiting tasks, with the time that each owner has used. Safe for several threads.

    A task that ``get`` returns must be run: the run counts its time.
    """

    def __init__(self, max_running: int, monotonic: Callable[[], float]) -> None:
        self._max_running = max_running
        self._monotonic = monotonic
        self._changed = threading.Condition()
        self._waiting: dict[str, collections.deque[Task]] = {}
        self._running: collections.Counter[str] = collections.Counter()
        self._used_s: dict[str, float] = {}
        # Used time of the owner of the most recently started task.
        self._level_s = 0.0
        self._num_ends = 0

    def put(self, task: Task | None) -> None:
        """Add a task; None ends one of the threads, once no task waits."""
        with self._changed:
            if task is None:
                self._num_ends += 1
            else:
                assert isinstance(task, OwnedTask)
                owner = task.owner
                if owner not in self._waiting:
                    self._waiting[owner] = collections.deque()
                    if not self._running[owner]:
                        used_s = self._used_s.get(owner, 0.0)
                        self._used_s[owner] = max(used_s, self._level_s)
                self._waiting[owner].append(task.task)
            self._changed.notify()

    def get(self) -> Task | None:
        """Wait for the next task that may run; return None to end the thread."""
        with self._changed:
            while (owner := self._next_owner()) is None:
                if self._num_ends and not self._waiting:
                    self._num_ends -= 1
                    return None
                self._changed.wait()
            tasks = self._waiting[owner]
            task = tasks.popleft()
            if not tasks:
                del self._waiting[owner]
            self._running[owner] += 1
            self._level_s = self._used_s[owner]
        return partial(self._run, owner, task)

    def _next_owner(self) -> str | None:
        may_run = [one for one in self._waiting if self._running[one] < self._max_running]
        return min(may_run, key=self._used_s.__getitem__, default=None)

    def _run(self, owner: str, task: Task) -> None:
        begin_s = self._monotonic()
        try:
            task()
        finally:
            with self._changed:
                self._used_s[owner] += self._monotonic() - begin_s
                self._running[owner] -= 1
                if not self._running[owner]:
                    del self._running[owner]
                if not self._waiting and not self._running:
                    self._used_s.clear()
                    self._level_s = 0.0
                self._changed.notify_all()
