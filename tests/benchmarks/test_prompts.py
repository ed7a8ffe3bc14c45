"""Loads of the benchmarks: equal for all systems, and as described."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks.checkpoints import FIRST_TEXT_TOKEN
from benchmarks.peers.loads import LOADS, Load, measure
from benchmarks.support.figures import RequestTimes
from benchmarks.support.prompts import (
    Prompt,
    distinct_prompts,
    gain_of_continuous,
    shared_prefix_prompts,
    skewed_lengths,
)

VOCAB_SIZE = 8192


def test_one_seed_makes_one_load() -> None:
    assert distinct_prompts(4, 32, VOCAB_SIZE, 7) == distinct_prompts(4, 32, VOCAB_SIZE, 7)
    assert distinct_prompts(4, 32, VOCAB_SIZE, 7) != distinct_prompts(4, 32, VOCAB_SIZE, 8)
    assert skewed_lengths(50, 256, 7) == skewed_lengths(50, 256, 7)


def test_prompts_share_what_they_are_to_share() -> None:
    prompts = shared_prefix_prompts(16, 48, 16, VOCAB_SIZE, 1)
    assert {len(prompt) for prompt in prompts} == {64}
    assert len({prompt[:48] for prompt in prompts}) == 1
    assert len({prompt[48:] for prompt in prompts}) == 16
    assert all(FIRST_TEXT_TOKEN <= token < VOCAB_SIZE for prompt in prompts for token in prompt)


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.name)
def test_no_run_of_a_load_finds_prompts_of_another(load: Load) -> None:
    runs = [load.prompts(run, VOCAB_SIZE) for run in range(4)]
    beginnings = {prompt[:16] for prompts in runs for prompt in prompts}
    assert len(beginnings) == (4 if load.num_shared_tokens else 4 * load.num_requests)
    assert load.num_requests % load.streams == 0


def test_later_measurements_have_prompts_of_their_own() -> None:
    """The prompts differ, so that one server can be measured again and again."""
    load, sent = LOADS[0], list[Prompt]()

    def send(load: Load, prompts: Sequence[Prompt]) -> Sequence[RequestTimes]:
        sent.extend(prompts)
        return [RequestTimes(0.0, (1.0, 2.0), load.num_output_tokens) for _ in prompts]

    for first_run in (0, 3):
        measure(send, load, 2, VOCAB_SIZE, first_run)
    assert len(set(sent)) == len(sent) == 2 * (load.streams + 2 * load.num_requests)


def test_skewed_lengths_are_mostly_short_and_one_is_the_longest() -> None:
    lengths = skewed_lengths(400, 256, 3)
    assert max(lengths) == 256
    assert min(lengths) >= 1
    assert 0.15 < sum(lengths) / len(lengths) / 256 < 0.25


def test_the_gain_of_continuous_batching_is_longest_over_mean() -> None:
    assert gain_of_continuous([5, 5, 5, 5], 2) == 1.0
    assert gain_of_continuous([1, 1, 1, 5], 4) == pytest.approx(5 / 2)
    assert gain_of_continuous([1, 3, 4], 2) == pytest.approx((2 * 3 + 4) / 8)
