"""Expected output lengths."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.scheduler.queues.measurements import OutputLengths


def test_nothing_known_is_the_prior_within_what_is_asked_for() -> None:
    output_lengths = OutputLengths(prior_tokens=100.0)
    assert output_lengths.expected_output("a", 4_096) == 100
    assert output_lengths.expected_output("a", 30) == 30
    assert output_lengths.expected_output("a", 0) == 0
    assert set(output_lengths.spread()) == {1.0}


def test_tenants_are_told_apart_and_newcomers_are_like_all() -> None:
    output_lengths = OutputLengths()
    for _ in range(200):
        output_lengths.observe("brief", 10)
        output_lengths.observe("long", 1_000)
    assert output_lengths.expected_output("brief", 4_096) == pytest.approx(10, rel=5.0, abs=40)
    assert output_lengths.expected_output("long", 4_096) == pytest.approx(1_000, rel=0.1)
    assert 300 < output_lengths.expected_output("new", 4_096) < 700


def test_what_was_long_ago_is_forgotten() -> None:
    output_lengths = OutputLengths()
    for _ in range(100):
        output_lengths.observe("a", 1_000)
    for _ in range(400):
        output_lengths.observe("a", 50)
    assert output_lengths.expected_output("a", 4_096) < 100


def test_the_spread_is_within_a_bucket() -> None:
    output_lengths, generator = OutputLengths(), random.Random(5)
    lengths = [generator.randrange(1, 1_000) for _ in range(2_000)]
    for length in lengths:
        output_lengths.observe("a", length)
    spread = output_lengths.spread()
    for number, factor in enumerate(spread):
        exact = 2 * (number + 0.5) / len(spread)
        assert exact / 2 < factor < 2 * exact


def test_the_tenants_that_were_not_heard_of_for_longest_are_forgotten() -> None:
    output_lengths = OutputLengths(max_tenants=2)
    for tenant in ("a", "b", "a", "c"):
        output_lengths.observe(tenant, 10)
    assert len(output_lengths) == 2
    assert set(output_lengths._tenants) == {"a", "c"}


@settings(max_examples=60)
@given(st.lists(st.integers(0, 100_000), max_size=60), st.integers(1, 10_000))
def test_estimates_stay_within_what_can_be(lengths: list[int], max_tokens: int) -> None:
    output_lengths = OutputLengths()
    for length in lengths:
        output_lengths.observe("a", length)
    assert 1 <= output_lengths.expected_output("a", max_tokens) <= max_tokens
    assert all(0 < factor <= len(output_lengths.spread()) for factor in output_lengths.spread())
