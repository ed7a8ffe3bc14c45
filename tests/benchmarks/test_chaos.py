"""A short round of ``benchmarks.chaos``: one of each event."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.chaos_clients import Arrivals
from benchmarks.chaos_round import EVENTS

_ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_nothing_is_lost_repeated_or_answered_twice() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.chaos", "--smoke"],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=170.0,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for event in EVENTS:
        assert f"{event.name}: 1 rounds, 0 lost, 0 with wrong indices" in done.stdout
    assert "all as it had to be" in done.stdout


@pytest.mark.parametrize(
    ("parts_s", "gap_s"),
    [
        ([1.0, 2.0, 6.0, 6.5], 4.0),  # across the event at 3
        ([1.0, 2.0, 3.5, 6.0], 2.5),  # behind it
        ([1.0, 2.5], None),  # over by then
        ([4.0, 9.0], None),  # not begun by then
        ([2.0, 4.0, 20.0, 90.0], 16.0),  # the last one begins too late to be its doing
        ([], None),
    ],
)
def test_the_longest_silence_is_that_across_the_event(
    parts_s: list[float], gap_s: float | None
) -> None:
    arrivals = Arrivals()
    arrivals.parts_s = parts_s
    assert arrivals.longest_gap_s(3.0, 13.0) == gap_s
