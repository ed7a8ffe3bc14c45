"""What several processes are given to run."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from tests.scheduling import LONG_ROOMS_S, longest_first, refuse_namesakes

_ROOT = Path(__file__).parents[2]


def test_tests_of_one_id_are_refused(request: pytest.FixtureRequest) -> None:
    refuse_namesakes([request.node])
    with pytest.raises(pytest.UsageError, match="test_tests_of_one_id_are_refused"):
        refuse_namesakes([request.node, request.node])


@pytest.mark.parametrize("room", LONG_ROOMS_S)
def test_a_long_room_is_there(room: str) -> None:
    assert (_ROOT / room).is_file()


class _Item:
    def __init__(self, room: str) -> None:
        self.nodeid = f"{room}::test_it"

    def get_closest_marker(self, _name: str) -> None:
        return None


def test_systems_begin_first_then_long_rooms() -> None:
    systems, short = "tests/e2e/test_walk.py", "tests/short.py"
    items = [cast(pytest.Item, _Item(room)) for room in (short, *reversed(LONG_ROOMS_S), systems)]
    first, *others, last = (item.nodeid.split("::")[0] for item in longest_first(items))
    assert (first, last) == (systems, short)
    assert [LONG_ROOMS_S[room] for room in others] == sorted(LONG_ROOMS_S.values(), reverse=True)
