"""Threads for work that must not hold up a step."""

from __future__ import annotations

import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Protocol

from millrace.engine.threads.choice import leave_core

Task = Callable[[], None]

_log = logging.getLogger(__name__)
_start_lock = threading.Lock()


class TaskQueue(Protocol):
    """Tasks that wait for a thread. ``get`` waits for one; each None that was put is got once."""

    def put(self, task: Task | None, /) -> None: ...

    def get(self) -> Task | None: ...


class TaskThreads:
    """Runs tasks in the order in which they come, or in that of ``tasks``, on threads that start
    with the first of them.

    The threads end with this object, and do not keep the process from ending. An error of
    a task is logged. ``stack_bytes`` 0 is the system's stack. A higher ``niceness`` leaves
    the cores to others.
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
        """Have ``task`` run soon. For one thread at a time."""
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
        # Of this thread alone: Linux schedules threads one by one.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
    while (task := tasks.get()) is not None:
        try:
            task()
        except Exception:  # noqa: BLE001 (whatever it is, the next task can run)
            _log.exception("a task of %s failed", threading.current_thread().name)
        # Not kept until the next one comes: it holds what it works on.
        del task


def _stop(tasks: TaskQueue, count: int) -> None:
    for _ in range(count):
        tasks.put(None)
