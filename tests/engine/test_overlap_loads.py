"""Any load on any pool, with steps that overlap and without: the same tokens, the same ends."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.engine.overlap_loads import ARRIVALS, CONFIGS, Arrival, ChoiceOutputs, World

_ROOMY = {"max_batch_tokens": 4_096, "max_num_sequences": 64, "overlap": False}
# Explaining traces every line, which takes minutes here.
_PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)


def _undisturbed(arrivals: list[Arrival]) -> dict[tuple[int, int], ChoiceOutputs]:
    """Return the outputs of an engine with room for all requests, whose host chooses all tokens."""
    world = World(arrivals, {"num_blocks": 512, "chooses": False, "says_finite": False}, **_ROOMY)
    world.run(disturbed=False)
    return dict(world.told)


def _agree(world: World, expected: dict[tuple[int, int], ChoiceOutputs], *, whole: bool) -> None:
    """Assert that all outputs are as expected; unless ``whole``, some choices may lack their
    end."""
    if whole:
        assert world.told.keys() == expected.keys()
    for key, told in world.told.items():
        wanted = expected[key]
        assert told.token_ids == wanted.token_ids[: len(told.token_ids)], key
        if whole or told.ending:
            assert told.token_ids == wanted.token_ids, key
            assert told.ending == wanted.ending, key
        assert told.logprob_tokens == wanted.logprob_tokens[: len(told.logprob_tokens)], key


@settings(max_examples=30, deadline=None, phases=_PHASES, suppress_health_check=list(HealthCheck))
@given(
    arrivals=ARRIVALS,
    config=CONFIGS,
    num_blocks=st.sampled_from([11, 14, 20, 64]),
    overlap=st.sampled_from([True, True, True, False]),
    disturbed=st.booleans(),
)
def test_overlap_changes_nothing_that_is_told(
    arrivals: list[Arrival],
    config: dict[str, Any],
    num_blocks: int,
    overlap: bool,
    disturbed: bool,
) -> None:
    expected = _undisturbed(arrivals)
    world = World(arrivals, {"num_blocks": num_blocks}, overlap=overlap, **config)
    world.run(disturbed=disturbed)
    _agree(world, expected, whole=not disturbed)
    if not disturbed:
        world.told.clear()
        world.run(disturbed=False)  # warm
        _agree(world, expected, whole=True)
    assert overlap or world.runner.num_unread_at_launch == 0


def _arrivals(seed: int) -> list[Arrival]:
    """Return twelve requests of all kinds at once, which fill any small pool."""
    pick = random.Random(seed)
    kinds = ["greedy", "drawn", "reported", "penalised", "scored", "choices"]
    return [
        Arrival(
            family=pick.randint(1, 3),
            shared_tokens=pick.choice([0, 16, 48]),
            own_tokens=pick.randint(0, 30),
            max_tokens=pick.randint(20, 60),
            priority=pick.randint(-1, 2),
            kind=pick.choice([*kinds, *kinds[:3] * 2]),
            seed=pick.randint(0, 5),
            num_stops=pick.choice([0, 2]),
            poisoned=False,
            gap=pick.randint(0, 3),
            cancel_after=None,
            takes_place=False,
            fault=None,
        )
        for _ in range(12)
    ]


@pytest.mark.parametrize("seed", range(3))
def test_a_pool_that_is_too_small_preempts_sequences_with_unread_tokens(seed: int) -> None:
    arrivals = _arrivals(seed)
    expected = _undisturbed(arrivals)
    world = World(arrivals, {"num_blocks": 13}, overlap=True, host_cache_bytes=4_096)
    world.run(disturbed=False)
    _agree(world, expected, whole=True)
    assert world.engine.stats().num_preemptions > 0
    assert world.runner.num_unread_at_launch > 0
    assert world.num_preempted_unread > 0


@pytest.mark.parametrize("seed", range(6))
def test_launches_and_reads_that_fail_end_no_more_than_stood_alone(seed: int) -> None:
    arrivals = _arrivals(seed)
    expected = _undisturbed(arrivals)
    faults = random.Random(seed)
    world = World(
        arrivals,
        {"num_blocks": 20, "breaks": lambda: faults.random() < 0.08},
        overlap=True,
        max_num_sequences=5,
    )
    world.run(disturbed=False)
    failed = 0
    for key, told in world.told.items():
        wanted = expected[key]
        if told.ending[1] is not None and wanted.ending[1] is None:
            assert told.ending[1][0] == "internal_error"
            assert told.token_ids == wanted.token_ids[: len(told.token_ids)]
            failed += 1
        else:
            assert told.token_ids == wanted.token_ids
            assert told.ending == wanted.ending
    assert failed < len(expected) / 2
    assert world.runner.num_failures > 5
