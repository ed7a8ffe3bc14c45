"""Threshold above which a start counts as slow."""

from __future__ import annotations

from benchmarks.engine.threads import Starts


def test_slow_is_twice_the_best_of_all_starts() -> None:
    starts = Starts(num_beside=0, bound=[0.25, 0.3], free=[0.26, 0.5, 0.51, 1.0], one_thread=[0.4])
    assert starts.num_slow(starts.bound) == 0
    assert starts.num_slow(starts.free) == 2
