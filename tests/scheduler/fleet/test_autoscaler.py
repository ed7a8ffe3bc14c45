"""Desired number of workers, and the time of each change."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from millrace.scheduler.fleet.autoscaler import Autoscaler, Signals
from millrace.schemas.config import AutoscaleConfig

CONFIG = AutoscaleConfig(
    min_workers=1,
    max_workers=8,
    target_wait_s=2.0,
    cold_start_s=8.0,
    scale_down_after_s=60.0,
    idle_s=300.0,
)
QUIET = Signals(
    num_workers=1,
    num_queued=0,
    num_held=0,
    num_slots=10,
    kv_share=0.0,
    per_s=0.0,
    wait_s=0.0,
    oldest_wait_s=0.0,
)


def desired(config: AutoscaleConfig = CONFIG, **changes: Any) -> int:
    return Autoscaler(config).desired(QUIET._replace(**changes), 0.0)


def test_nothing_is_scaled_unless_it_is_asked_for() -> None:
    assert desired(AutoscaleConfig(), num_queued=1_000, wait_s=100.0) == 0


def test_a_quiet_model_keeps_its_least() -> None:
    assert desired() == 1


def test_a_queue_that_would_wait_too_long_gets_more_at_once() -> None:
    # 10 a second by two workers, 100 wait: 10 + 100 / 10 s are wanted, 5 a second each.
    assert desired(num_workers=2, num_queued=100, per_s=10.0, wait_s=10.0) == 4


def test_a_short_wait_changes_nothing() -> None:
    assert desired(num_workers=2, num_queued=10, per_s=10.0, wait_s=1.0) == 1


def test_a_queue_that_nobody_works_off_gets_one_more() -> None:
    assert desired(num_workers=3, num_queued=5, wait_s=None, oldest_wait_s=9.0) == 4


def test_full_slots_and_a_full_cache_want_more() -> None:
    assert desired(num_workers=2, num_held=20) == 3
    assert desired(num_workers=4, num_held=4, kv_share=0.95) == 5


def test_warm_workers_come_on_top_of_those_that_work() -> None:
    warm = msgspec.structs.replace(CONFIG, min_workers=0, warm=2)
    assert Autoscaler(warm).desired(QUIET, 1e6) == 2
    assert desired(warm, num_held=1) == 3
    assert desired(warm, num_held=10) == desired(num_held=10) + 2
    assert desired(warm, num_held=1_000) == 8  # within the bounds


def test_scaling_goes_up_at_once_and_down_late() -> None:
    scaler = Autoscaler(CONFIG)
    assert scaler.desired(QUIET._replace(num_workers=1, num_held=30), 0.0) == 4
    assert scaler.desired(QUIET._replace(num_workers=4, num_held=5), 30.0) == 4
    assert scaler.desired(QUIET._replace(num_workers=4, num_held=5), 59.0) == 4
    assert scaler.desired(QUIET._replace(num_workers=4, num_held=5), 61.0) == 1


def test_scaling_down_may_be_immediate() -> None:
    autoscaler = Autoscaler(msgspec.structs.replace(CONFIG, scale_down_after_s=0.0))
    assert autoscaler.desired(QUIET._replace(num_held=40), 0.0) > 1
    assert autoscaler.desired(QUIET, 1.0) == 1


def test_a_model_that_nobody_asks_for_has_none_and_the_first_job_wakes_it() -> None:
    config = AutoscaleConfig(min_workers=0, max_workers=4, scale_down_after_s=10.0, idle_s=100.0)
    scaler = Autoscaler(config)
    assert scaler.desired(QUIET, 0.0) == 1
    assert scaler.desired(QUIET, 99.0) == 1
    assert scaler.desired(QUIET, 111.0) == 0
    waiting = QUIET._replace(num_workers=0, num_queued=1, wait_s=None)
    assert scaler.desired(waiting, 200.0) == 1


@given(
    st.lists(
        st.builds(
            Signals,
            num_workers=st.integers(0, 20),
            num_queued=st.integers(0, 10_000),
            num_held=st.integers(0, 1_000),
            num_slots=st.integers(0, 256),
            kv_share=st.floats(0, 1),
            per_s=st.floats(0, 1_000),
            wait_s=st.none() | st.floats(0, 1_000),
            oldest_wait_s=st.floats(0, 1_000),
        ),
        max_size=30,
    )
)
def test_scaling_stays_within_its_bounds(history: list[Signals]) -> None:
    scaler = Autoscaler(CONFIG)
    for number, signals in enumerate(history):
        assert 1 <= scaler.desired(signals, number * 1.0) <= 8
