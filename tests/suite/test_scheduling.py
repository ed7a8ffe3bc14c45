"""Scheduling of tests over several processes."""

from __future__ import annotations

from typing import cast

import pytest

from tests.runner.measured import Measured, Room
from tests.runner.scheduling import longest_first, refuse_namesakes
from tests.support.repository import ROOT


def test_tests_of_one_id_are_refused(request: pytest.FixtureRequest) -> None:
    refuse_namesakes([request.node])
    with pytest.raises(pytest.UsageError, match="test_tests_of_one_id_are_refused"):
        refuse_namesakes([request.node, request.node])


def test_the_measured_files_are_those_of_today() -> None:
    """A file that was moved or deleted since is measured anew by `make measure-tests`."""
    rooms = Measured.read().rooms
    assert len(rooms) > 100
    gone = [room for room in rooms if not (ROOT / room).is_file()]
    assert len(gone) < len(rooms) / 20, gone


class _Item:
    def __init__(self, room: str) -> None:
        self.nodeid = f"{room}::test_it"


def test_systems_begin_first_then_the_files_that_took_longest() -> None:
    systems, new = "tests/e2e/test_walk.py", "tests/new.py"
    took_s = {"tests/short.py": 1.0, "tests/long.py": 60.0, systems: 30.0, "tests/middle.py": 8.0}
    measured = Measured("a CPU", {room: Room(0.0, s, 1) for room, s in took_s.items()}, {})
    items = [cast(pytest.Item, _Item(room)) for room in (new, *took_s)]
    order = [item.nodeid.split("::")[0] for item in longest_first(items, measured)]
    assert order == [systems, "tests/long.py", "tests/middle.py", "tests/short.py", new]
