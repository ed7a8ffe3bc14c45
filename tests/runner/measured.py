"""Measured times of each file of tests.

`make measure-tests` runs every test and writes the figures into ``measured.json``, with the name of
the CPU. They order the files of a run, and predict the time of a choice of tests.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from tests.runner.cpu_times import Seconds, by_room

FILE: Final = Path(__file__).with_name("measured.json")


class Room(msgspec.Struct, array_like=True, frozen=True):
    """Room: all tests of one file."""

    cpu_s: float
    wall_s: float
    tests: int


class Measured(msgspec.Struct, frozen=True):
    """The figures of one run."""

    cpu: str
    rooms: dict[str, Room]
    slow_test_s: dict[str, float]
    """CPU seconds of each test of the slow tier."""

    @classmethod
    def read(cls, file: Path = FILE) -> Measured:
        """Read the figures in the file. Raise msgspec.DecodeError for a damaged one."""
        return msgspec.json.decode(file.read_bytes(), type=cls)

    def fast_cpu_s(self, files: Iterable[str]) -> float:
        """Return the CPU seconds of the fast tests of these files; an unmeasured file counts 0."""
        wanted = set(files) & self.rooms.keys()
        slow = (s for node_id, s in self.slow_test_s.items() if node_id.split("::")[0] in wanted)
        return sum(self.rooms[file].cpu_s for file in wanted) - sum(slow)

    def write(self, file: Path = FILE) -> None:
        """Write the figures, one room a line, so that a diff shows what changed."""
        lines = msgspec.json.format(msgspec.json.encode(self, order="sorted"), indent=1)
        file.write_bytes(lines + b"\n")


def measured_run(tests: dict[str, Seconds], slow: set[str]) -> Measured:
    """Return the figures of a run by its tests' ids. ``slow`` are the ids of the slow tier."""
    numbers = dict.fromkeys(by_room(tests), 0)
    for node_id in tests:
        numbers[node_id.split("::", 1)[0]] += 1
    rooms = {
        room: Room(round(seconds.cpu_s, 1), round(seconds.wall_s, 1), numbers[room])
        for room, seconds in by_room(tests).items()
    }
    slow_test_s = {node_id: round(tests[node_id].cpu_s, 1) for node_id in slow & tests.keys()}
    return Measured(_cpu_name(), rooms, slow_test_s)


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
