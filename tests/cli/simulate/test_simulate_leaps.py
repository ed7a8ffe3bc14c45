"""Many steps at once are the same as one by one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.schemas.config import SimulationConfig
from millrace.simulation.workers.leaps import ConsecutiveTokens, LeapingBatch
from millrace.workers.simulated.batch import SimulatedBatch
from millrace.workers.simulated.blocks import GenerationLimits, SimulatedSequence
from millrace.workers.simulated.latency_model import LatencyModel

LATENCY = LatencyModel(
    SimulationConfig(
        prefill_tokens_per_s=1_000.0,
        step_ms=4.0,
        step_ms_per_sequence=1.0,
        step_ms_per_kv_token=0.01,
    )
)


def _bounds(num_blocks: int, num_slots: int) -> dict[str, Any]:
    return {
        "max_num_sequences": num_slots,
        "max_batch_tokens": 48,
        "num_blocks": num_blocks,
        "block_size_tokens": 4,
        "prefix_cache": True,
    }


def _sequence(number: int, num_prompt: int, num_out: int, priority: int = 0) -> SimulatedSequence:
    return SimulatedSequence(
        f"r{number}",
        range(1_000 * number, 1_000 * number + num_prompt),
        limits=GenerationLimits(num_to_make=num_out),
        seed=1_000 * number + num_prompt,
        priority=priority,
    )


Request = tuple[float, int, int, int]


def _leap(requests: list[Request], bounds: dict[str, Any]) -> tuple[dict[str, float], Any]:
    batch, ends, now_s = LeapingBatch(LATENCY, **bounds), dict[str, float](), 0.0
    arrivals = [(at_s, _sequence(i, *rest)) for i, (at_s, *rest) in enumerate(requests)]
    end_s: float | None = None
    while arrivals or end_s is not None:
        if arrivals and (end_s is None or arrivals[0][0] < end_s):
            now_s, sequence = arrivals.pop(0)
            if end_s is not None:
                end_s = batch.interrupt(now_s)
            batch.add(sequence)
        else:
            assert end_s is not None
            now_s = end_s
            for over in batch.finish().finished:
                ends[over.request_id] = now_s
            batch.check_integrity()
            end_s = None
        if end_s is None:
            while arrivals and arrivals[0][0] <= now_s:
                batch.add(arrivals.pop(0)[1])
            end_s = batch.begin_at(now_s)
    return ends, batch


def _step(requests: list[Request], bounds: dict[str, Any]) -> tuple[dict[str, float], Any]:
    batch = SimulatedBatch(LATENCY, ConsecutiveTokens(), **bounds)
    ends, now_s = dict[str, float](), 0.0
    arrivals = [(at_s, _sequence(i, *rest)) for i, (at_s, *rest) in enumerate(requests)]
    while arrivals or batch.has_work:
        while arrivals and arrivals[0][0] <= now_s:
            batch.add(arrivals.pop(0)[1])
        step_s = batch.begin()
        if step_s is None:
            now_s = arrivals[0][0]
            continue
        now_s += step_s
        while arrivals and arrivals[0][0] < now_s:
            batch.add(arrivals.pop(0)[1])
        for over in batch.finish().finished:
            ends[over.request_id] = now_s
    return ends, batch


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(
        st.tuples(
            st.floats(0.0, 2.0, width=32), st.integers(1, 60), st.integers(1, 40), st.integers(0, 2)
        ),
        min_size=1,
        max_size=12,
    ),
    num_blocks=st.integers(30, 120),
    num_slots=st.integers(1, 6),
)
def test_a_leap_takes_as_long_as_its_steps(
    requests: list[Request], num_blocks: int, num_slots: int
) -> None:
    requests = sorted(requests)
    bounds = _bounds(num_blocks, num_slots)
    leapt, leaping = _leap(requests, bounds)
    stepped, stepping = _step(requests, bounds)
    assert leapt.keys() == stepped.keys()
    for request_id, end_s in stepped.items():
        assert leapt[request_id] == pytest.approx(end_s, abs=1e-6)
    for count in ("num_steps", "prefill_tokens", "decode_tokens", "num_preemptions"):
        assert getattr(leaping, count) == getattr(stepping, count), count
    assert leaping.busy_s == pytest.approx(stepping.busy_s)


def test_finished_steps_are_settled_at_any_time() -> None:
    batch = LeapingBatch(LATENCY, **_bounds(100, 4))
    sequence = _sequence(1, 8, 20)
    batch.add(sequence)
    prefilled_s = batch.begin_at(0.0)
    assert prefilled_s is not None
    batch.finish()
    end_s = batch.begin_at(prefilled_s)
    assert end_s is not None
    assert sequence.num_made == 1
    batch.settle(prefilled_s + (end_s - prefilled_s) / 2)
    assert 8 <= sequence.num_made <= 12
    assert batch.interrupt(prefilled_s + (end_s - prefilled_s) / 2) < end_s
    assert not batch.finish().finished
    assert sequence.token_ids == list(range(1_000, 1_000 + len(sequence.token_ids)))
