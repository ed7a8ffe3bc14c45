"""Cost model of a step, learnt in spite of noise, outliers and dull loads."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.engine.scheduling.cost_model import CostModel, StepWork, chunk_pairs

COEFFICIENTS = (4e-3, 2e-4, 3e-4, 1e-7, 2e-8)


def true_s(work: StepWork) -> float:
    return sum(c * x for c, x in zip(COEFFICIENTS, (1, *work), strict=True))


def some_work(draw: random.Random) -> StepWork:
    decodes = draw.randrange(33)
    chunk = draw.choice((0, 0, draw.randrange(16, 480)))
    pairs = chunk_pairs(chunk, draw.randrange(3000))
    return StepWork(chunk, decodes, sum(draw.randrange(2000) for _ in range(decodes)), pairs)


def learnt(seed: int, num_steps: int, outliers: float = 0.0) -> CostModel:
    draw = random.Random(seed)
    model = CostModel()
    for _ in range(num_steps):
        work = some_work(draw)
        slow = 10 if draw.random() < outliers else 1
        model.observe(work, true_s(work) * draw.uniform(0.95, 1.05) * slow)
    return model


@pytest.mark.parametrize("outliers", [0.0, 0.02])
def test_cost_model_learns_the_time_of_a_step(outliers: float) -> None:
    model = learnt(1, 300, outliers)
    draw = random.Random(2)
    for _ in range(50):
        work = some_work(draw)
        assert model.step_s(work) == pytest.approx(true_s(work), rel=0.1)
    alone = StepWork(256, prefill_pairs=chunk_pairs(256, 0))
    assert model.prefill_s(256) == pytest.approx(true_s(alone) - COEFFICIENTS[0], rel=0.15)


def test_a_chunk_under_a_bound_is_as_large_as_it_may_be() -> None:
    model = learnt(3, 300)
    beside = StepWork(0, 16, 16_000)
    chunk = model.largest_chunk(0.05, beside, 500)

    def step_s(size: int) -> float:
        return model.step_s(
            beside._replace(prefill_tokens=size, prefill_pairs=chunk_pairs(size, 500))
        )

    assert step_s(chunk) <= 0.05 < step_s(chunk + 1)
    assert model.largest_chunk(1e-3, beside, 500) == 0


def test_a_dull_load_forgets_nothing_and_tells_nothing_new() -> None:
    model = learnt(4, 300)
    before_s = model.prefill_s(256)
    for _ in range(5000):
        model.observe(StepWork(0, 8, 4000), 2 * true_s(StepWork(0, 8, 4000)))
    assert model.step_s(StepWork(0, 8, 4000)) == pytest.approx(
        2 * true_s(StepWork(0, 8, 4000)), 0.05
    )
    assert model.prefill_s(256) == pytest.approx(before_s, rel=0.3)


def test_nothing_is_believed_before_it_was_seen() -> None:
    model = CostModel()
    assert not model.is_warm
    assert model.step_s(StepWork(100, 4)) == 0.0
    assert learnt(5, 20).is_warm


@settings(deadline=None, max_examples=50)
@given(
    st.lists(
        st.tuples(
            st.tuples(*[st.integers(0, 100_000)] * 4),
            st.floats(0.0, 1e3, allow_nan=False),
        ),
        max_size=60,
    )
)
def test_no_history_makes_a_step_take_less_than_nothing(
    history: list[tuple[tuple[int, int, int, int], float]],
) -> None:
    model = CostModel()
    for work, step_s in history:
        model.observe(StepWork(*work), step_s)
    assert model.step_s(StepWork(100, 10, 1000, 1000)) >= 0
    assert model.prefill_s(1000) >= 0
    assert model.largest_chunk(0.05, StepWork(0, 4, 1000), 100) >= 0
