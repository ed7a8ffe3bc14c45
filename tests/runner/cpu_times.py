"""CPU and wall-clock seconds of each test, the processes that it started included."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_UTIME = 11  # of the fields that follow the name of the process in /proc/PID/stat


class Seconds(NamedTuple):
    """Time of a test, or of all tests of a file."""

    cpu_s: float
    wall_s: float


def _descendants(pid: int) -> Iterator[int]:
    """Return the living descendants of a process, each after its parent."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        children = [
            child for thread in threads for child in (thread / "children").read_text().split()
        ]
    except OSError:  # it, or a thread of it, has just ended
        return
    for child in children:
        yield int(child)
        yield from _descendants(int(child))


def _ticks(pid: int) -> int:
    """Return the CPU time of a process and of its reaped children, in clock ticks; 0 once it is
    gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return sum(map(int, stat.rpartition(")")[2].split()[_UTIME : _UTIME + 4]))


def tree_cpu_s() -> float:
    """Return the CPU seconds of this process and of all processes that it started, living or
    reaped."""
    own = os.times()
    living = sum(_ticks(pid) for pid in _descendants(os.getpid()))
    return sum(own[:4]) + living / _TICKS_PER_S


class Meter:
    """Meter of the time between marks. A process that dies unreaped takes its time with it."""

    def __init__(self) -> None:
        self._cpu_s = tree_cpu_s()
        self._wall_s = time.monotonic()

    def lap(self) -> Seconds:
        """Return the seconds that were used since the last lap."""
        cpu_s, wall_s = tree_cpu_s(), time.monotonic()
        used = Seconds(max(0.0, cpu_s - self._cpu_s), wall_s - self._wall_s)
        self._cpu_s, self._wall_s = cpu_s, wall_s
        return used


def by_room(tests: dict[str, Seconds]) -> dict[str, Seconds]:
    """Return the sums of a file's tests, by its path."""
    rooms: dict[str, list[Seconds]] = defaultdict(list)
    for node_id, seconds in tests.items():
        rooms[node_id.split("::", 1)[0]].append(seconds)
    return {
        room: Seconds(sum(s.cpu_s for s in all_s), sum(s.wall_s for s in all_s))
        for room, all_s in rooms.items()
    }
