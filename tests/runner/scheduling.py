"""Assignment of tests to processes, and the order in which tests begin.

A file's tests stay together, since its fixtures are made once for each process. Tests of whole
systems stay together too: they share one system, and two of them at a time would be too many for a
small machine. Files of long tests without shared fixtures are split: each of their tests goes
alone.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.runner.measured import Measured

_SYSTEMS = "tests/e2e/"
_ALONE = ("tests/engine/models/test_random_checkpoints.py",)


def room_of(node_id: str) -> str:
    """Return the name of the room: the tests that one process runs one after the other."""
    if node_id.startswith(_SYSTEMS):
        return _SYSTEMS
    if node_id.startswith(_ALONE):
        return node_id
    return node_id.split("::", 1)[0]


def refuse_namesakes(items: list[pytest.Item]) -> None:
    """Raise UsageError if two tests have one id: pytest-xdist would silently run only one."""
    counts = Counter(item.nodeid for item in items)
    namesakes = sorted(name for name, count in counts.items() if count > 1)
    if namesakes:
        raise pytest.UsageError(f"Several tests have the same id: {', '.join(namesakes)}")


def longest_first(items: list[pytest.Item], measured: Measured) -> list[pytest.Item]:
    """Order rooms: first systems, which wait more than they compute, then the longest measured
    rooms, then large ones, so that no process has a long room left at the end."""
    rooms: dict[str, list[pytest.Item]] = {}
    for item in items:
        rooms.setdefault(room_of(item.nodeid), []).append(item)

    def rank(name: str) -> tuple[bool, float, int]:
        file = name.split("::", 1)[0]
        known = measured.rooms.get(file)
        return name != _SYSTEMS, -known.wall_s if known else 0.0, -len(rooms[name])

    return [item for name in sorted(rooms, key=rank) for item in rooms[name]]


class RoomScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Hands out rooms in the order in which their tests were collected."""

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False

    def _split_scope(self, nodeid: str) -> str:
        return room_of(nodeid)
