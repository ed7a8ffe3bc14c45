"""Cost of a token, by process."""

from __future__ import annotations

import pytest

from benchmarks.support.processes import Reading
from benchmarks.system.token_path import shares


def test_processes_of_a_role_are_summed_and_the_busiest_comes_first() -> None:
    before = {1: Reading("a", 1.0, 10), 2: Reading("b", 0.0, 0), 3: Reading("b", 5.0, 100)}
    after = {1: Reading("a", 1.1, 30), 2: Reading("b", 0.2, 100), 3: Reading("b", 5.1, 200)}
    busiest, other = shares(before, after, num_tokens=100, wall_s=2.0)
    assert (busiest.role, other.role) == ("b", "a")
    assert busiest.cpu_us_per_token == pytest.approx(3000.0)
    assert busiest.switches_per_token == pytest.approx(2.0)
    assert other.core_percent == pytest.approx(5.0)


def test_what_began_or_ended_meanwhile_is_left_out() -> None:
    assert not shares({1: Reading("a", 1.0, 1)}, {2: Reading("a", 2.0, 2)}, 10, 1.0)
