"""Processes: those that a benchmark starts, and what any of them has used."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess

import psutil

SPAWN = multiprocessing.get_context("spawn")


@contextlib.contextmanager
def spawned(target: Callable[..., None], *args: object) -> Iterator[BaseProcess]:
    """``target`` in a process of its own, which is killed at the end of the block."""
    process = SPAWN.Process(target=target, args=args, daemon=True)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


class ProcessUsage:
    """What a process has used, seen from outside."""

    def __init__(self, pid: int | None) -> None:
        self._process = psutil.Process(pid)

    def cpu_s(self) -> float:
        """CPU time of all its threads so far."""
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def rss_bytes(self) -> int:
        return int(self._process.memory_info().rss)

    def num_files(self) -> int:
        """Open files, sockets among them."""
        return int(self._process.num_fds())
