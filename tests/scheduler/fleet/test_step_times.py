"""Steps that decode, by the size of their batch."""

from __future__ import annotations

import random

import pytest

from millrace.scheduler.fleet.worker_view import StepTimes


def told(pairs: list[tuple[int, float]], num_slots: int = 64) -> StepTimes:
    steps = StepTimes()
    for batch, step_s in pairs:
        steps.observe(batch, step_s, num_slots)
    return steps


def test_without_measurements_a_step_takes_zero() -> None:
    assert StepTimes().at(5) == 0


def test_one_batch_says_little_of_others() -> None:
    steps = told([(16, 0.02)] * 30)
    assert steps.at(16) == pytest.approx(0.02)
    assert 0.02 < steps.at(32) < 0.04
    assert 0.01 < steps.at(1) < 0.02


@pytest.mark.parametrize(("base_s", "each_s"), [(0.008, 0.000_05), (0.003, 0.000_3)])
def test_a_linear_relation_is_fitted(base_s: float, each_s: float) -> None:
    generator = random.Random(3)
    batches = [generator.randrange(5, 60) for _ in range(200)]
    steps = told([(batch, base_s + each_s * batch) for batch in batches])
    for batch in (1, 30, 64):
        assert steps.at(batch) == pytest.approx(base_s + each_s * batch, rel=0.1)


def test_a_larger_batch_is_never_faster() -> None:
    steps = told([(60, 0.01), (5, 0.02)] * 20)
    assert steps.at(1) < steps.at(30) < steps.at(64)
