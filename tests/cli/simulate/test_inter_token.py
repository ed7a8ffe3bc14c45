"""Gaps between tokens: percentiles, and gaps of several steps taken at once."""

from __future__ import annotations

import math
import random

import pytest

from benchmarks.support.figures import percentile
from millrace.schemas.config import SimulationConfig
from millrace.simulation.outcomes import InterTokenLatencies
from millrace.simulation.workers.leaps import LeapingBatch
from millrace.workers.simulated.blocks import GenerationLimits, SimulatedSequence
from millrace.workers.simulated.latency_model import LatencyModel


def test_percentiles_are_right_to_half_a_percent() -> None:
    chance = random.Random(3)
    gaps_s = [chance.lognormvariate(-4, 1) for _ in range(20_000)]
    latencies = InterTokenLatencies()
    for gap_s in gaps_s:
        latencies.add(gap_s)
    assert latencies.count == len(gaps_s)
    assert latencies.max_s == max(gaps_s)
    assert latencies.mean_s == pytest.approx(sum(gaps_s) / len(gaps_s))
    for share in (0.01, 0.5, 0.9, 0.99):
        assert latencies.at(share) == pytest.approx(percentile(gaps_s, share), rel=0.01)


def test_without_any_all_is_nothing() -> None:
    latencies = InterTokenLatencies()
    assert (latencies.at(0.99), latencies.mean_s, latencies.max_s) == (0.0, 0.0, 0.0)


def test_gaps_that_grow_are_as_good_as_one_by_one() -> None:
    together, alone = InterTokenLatencies(), InterTokenLatencies()
    together.add_growing(0.010, 0.000_02, 3_000, 4)
    for number in range(3_000):
        alone.add(0.010 + number * 0.000_02, 4)
    assert together.count == alone.count == 12_000
    assert together.mean_s == pytest.approx(alone.mean_s)
    assert together.max_s == pytest.approx(alone.max_s, rel=0.006)
    for share in (0.01, 0.5, 0.99):
        assert together.at(share) == pytest.approx(alone.at(share), rel=0.006)


def test_leaps_have_the_gaps_of_their_steps() -> None:
    """Two streams of 200 tokens, each step longer than the one before, a third prompt between."""
    latency = LatencyModel(
        SimulationConfig(
            prefill_tokens_per_s=1_000.0,
            step_ms=4.0,
            step_ms_per_sequence=1.0,
            step_ms_per_kv_token=0.01,
        )
    )
    batch = LeapingBatch(
        latency, max_num_sequences=4, max_batch_tokens=500, num_blocks=1_000,
        block_size_tokens=4, prefix_cache=True,
    )  # fmt: skip
    streams = [
        SimulatedSequence(
            f"r{n}", range(100 * n, 100 * n + 10),
            limits=GenerationLimits(num_to_make=200), seed=10_000 * n,
        )
        for n in range(2)
    ]  # fmt: skip
    for stream in streams:
        batch.add(stream)
    end_s = batch.begin_at(0.0)
    assert end_s is not None
    assert end_s == pytest.approx(0.020)
    batch.finish()
    assert batch.begin_at(end_s) is not None
    interrupted_s = batch.interrupt(1.0)
    assert 1.0 <= interrupted_s < 1.02
    prompt = SimulatedSequence(
        "p", range(50_000, 50_300), limits=GenerationLimits(num_to_make=1), seed=1
    )
    batch.add(prompt)
    batch.finish()
    num_before = streams[0].num_made
    end_s = batch.begin_at(interrupted_s)
    assert end_s is not None
    long_s = end_s - interrupted_s
    assert long_s > 0.3
    batch.finish()
    while end_s is not None:
        end_s = batch.begin_at(end_s)
        if end_s is not None:
            batch.finish()
    found = batch.inter_token
    assert found.count == 2 * 199
    assert found.max_s == pytest.approx(long_s)
    step_ms = [4 + 2 + 0.01 * 2 * (10 + made) for made in range(1, 200) if made != num_before]
    assert found.mean_s * 199 == pytest.approx(sum(step_ms) / 1e3 + long_s)
    assert found.at(0.5) == pytest.approx(percentile(step_ms, 0.5) / 1e3, rel=0.01)
    assert math.isclose(found.at(0.0), min(step_ms) / 1e3, rel_tol=0.006)
