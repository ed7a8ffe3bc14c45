"""Usage by the minute: equal to the stored requests after crashes, moves and late rows."""

from __future__ import annotations

import asyncio
from decimal import Decimal
from typing import Any

import msgspec
import pytest

from millrace.runtime.clock import SystemClock
from millrace.schemas.records import RequestRecord
from millrace.telemetry.rollups.rollups import Rollups
from millrace.telemetry.store.reading import Parameters
from millrace.telemetry.store.store import Store, StoreUnavailableError
from millrace.telemetry.store.tables import REQUESTS, WORKER_SAMPLES
from tests.support.manual_clock import ManualClock
from tests.support.waiting import eventually
from tests.telemetry.books import FIRST_S, REQUEST_ROWS, SAMPLE_ROWS
from tests.telemetry.records import request_record

BY_MINUTE = """
SELECT minute, tenant, user, model, adapter, source, tier, currency, price_version,
    sum(requests), sum(done), sum(prompt_tokens), sum(completion_tokens), sum(cost),
    sum(device_us), sum(device_cost), sum(num_moves)
FROM usage_by_minute FINAL
GROUP BY ALL
ORDER BY ALL
"""
BY_REQUEST = """
SELECT toStartOfMinute(done_at) AS minute, tenant, user,
    if(model_served = '', model_requested, model_served) AS model,
    adapter, source, tier, currency, price_version,
    count(), countIf(status = 'done'), sum(prompt_tokens), sum(completion_tokens), sum(cost),
    sum(device_us), sum(device_cost), sum(length(lives))
FROM requests FINAL
GROUP BY ALL
ORDER BY ALL
"""


def rollups(store: Store, interval_s: float = 1.0) -> Rollups:
    return Rollups(store, SystemClock(), interval_s)


async def insert(store: Store, records: list[RequestRecord], first: int, token: str) -> None:
    sequences = range(first, first + len(records))
    await store.insert(REQUESTS, REQUESTS.to_columns(records, sequences), token)


async def check_equal(store: Store) -> None:
    counted = await store.rows(BY_MINUTE)
    assert counted == await store.rows(BY_REQUEST)
    assert counted


async def test_what_is_touched_is_counted_and_counted_again_the_same(store: Store) -> None:
    records = [request_record(n, done_ns=(FIRST_S + 7 * n) * 10**9) for n in range(100)]
    rollup = rollups(store)
    for first in (0, 50):
        some = records[first : first + 50]
        await insert(store, some, first + 1, f"{first}")
        rollup.touched(record.done_ns for record in some)
        await rollup.settle()
        await check_equal(store)
    await insert(store, records, 1, "replayed")
    rollup.touched(record.done_ns for record in records)
    await rollup.settle()
    await check_equal(store)
    assert await rollup.reconcile() == 0


async def test_a_record_that_replaces_one_of_another_minute_moves_it(store: Store) -> None:
    first = REQUEST_ROWS[0]
    later = msgspec.structs.replace(
        first, done_ns=first.done_ns + 600 * 10**9, user="other", cost=Decimal(7), epoch=2
    )
    rollup = rollups(store)
    await insert(store, [first], 1, "first")
    await rollup.reconcile()
    await insert(store, [later], 2, "later")
    rollup.touched([first.done_ns, later.done_ns])
    await rollup.settle()
    await check_equal(store)
    assert await store.rows("SELECT sum(requests), sum(cost) FROM usage_by_minute FINAL") == [
        (1, Decimal(7))
    ]
    await store.command("TRUNCATE TABLE usage_by_minute")
    await insert(store, [first], 1, "first again")
    assert await rollup.reconcile() == 1
    await check_equal(store)


async def test_a_minute_that_nobody_touched_for_what_left_it_is_found(store: Store) -> None:
    first = REQUEST_ROWS[0]
    rollup = rollups(store)
    await insert(store, [first], 1, "first")
    await rollup.reconcile()
    later = msgspec.structs.replace(first, done_ns=first.done_ns + 600 * 10**9)
    await insert(store, [later], 2, "later")
    rollup.touched([later.done_ns])
    await rollup.settle()
    assert await rollup.reconcile(days=3) == 1
    await check_equal(store)


async def test_a_row_that_comes_after_its_time_leaves_what_was_counted(store: Store) -> None:
    record = REQUEST_ROWS[0]
    await insert(store, [record], 1, "in time")
    await rollups(store).reconcile()
    counted = await store.rows(BY_MINUTE)
    await store.command("TRUNCATE TABLE requests")
    late = msgspec.structs.replace(record, request_id="late", prompt_tokens=1, cached_tokens=0)
    await insert(store, [late], 2, "late")
    clock = ManualClock(record.done_ns + 399 * 24 * 3_600 * 10**9)
    rollup = Rollups(store, clock, 1.0)
    rollup.touched([late.done_ns])
    await rollup.settle()
    assert await store.rows(BY_MINUTE) == counted


async def test_what_a_crash_left_between_insert_and_count_is_found_at_the_start(
    store: Store,
) -> None:
    await insert(store, REQUEST_ROWS[:3], 1, "counted")
    await rollups(store).reconcile()
    # The process is killed after the insert: nothing of what was touched is left.
    await insert(store, REQUEST_ROWS[3:], 4, "not counted")
    assert await rollups(store).reconcile() == 1
    await check_equal(store)
    assert await rollups(store).reconcile() == 0


async def test_a_count_that_was_cut_short_is_found_at_the_start(store: Store) -> None:
    await insert(store, REQUEST_ROWS, 1, "all")
    await rollups(store).reconcile()
    await store.command("DELETE FROM usage_by_minute WHERE user = 'ann'")
    assert await rollups(store).reconcile() > 0
    await check_equal(store)


async def test_a_clock_that_went_back_does_not_win(store: Store) -> None:
    await insert(store, REQUEST_ROWS[:1], 1, "first")
    await rollups(store).reconcile()
    await store.command(
        "INSERT INTO usage_by_minute SELECT * REPLACE (version + 3600000000000 AS version) "
        "FROM usage_by_minute"
    )
    await insert(store, REQUEST_ROWS, 2, "all")
    await rollups(store).reconcile()
    await check_equal(store)


async def test_many_minutes_over_many_days(store: Store) -> None:
    records = [
        request_record(n, done_ns=(FIRST_S - 20 * 86_400 + 3_000 * n) * 10**9) for n in range(600)
    ]
    await insert(store, records, 1, "all")
    rollup = rollups(store)
    rollup.touched(record.done_ns for record in records)
    await rollup.settle()
    assert rollup.num_computed == 600
    await check_equal(store)
    assert await rollup.reconcile() == 0


async def test_workers_minutes_follow_the_samples(store: Store) -> None:
    columns = WORKER_SAMPLES.to_columns(SAMPLE_ROWS, range(1, 4))
    for token in ("once", "twice"):
        await store.insert(WORKER_SAMPLES, columns, token)
    assert await rollups(store).reconcile() == 2
    totals = "SELECT sum(samples), sum(busy_us), sum(idle_us), sum(charged_us) FROM {}"
    expected = [(3, 2_100_000, 2_900_000, 2_000_000)]
    assert await store.rows(totals.format("workers_by_minute FINAL")) == expected
    assert await rollups(store).reconcile() == 0


async def test_a_step_that_is_longer_than_a_period_makes_no_idle_time(store: Store) -> None:
    """A step is reported at its end.

    The period before looks idle, and the step seems longer than its own period.
    """
    busy_us = (600_000, 1_400_000, 0, 1_900_000)
    samples = [
        msgspec.structs.replace(
            SAMPLE_ROWS[0],
            sampled_ns=(FIRST_S + number) * 10**9,
            period_ms=1_000.0,
            busy_us=busy,
            charged_us=busy,
        )
        for number, busy in enumerate(busy_us)
    ]
    await store.insert(WORKER_SAMPLES, WORKER_SAMPLES.to_columns(samples, range(1, 5)), "steps")
    await rollups(store).reconcile()
    totals = "SELECT sum(period_ms), sum(busy_us), sum(idle_us) FROM workers_by_minute FINAL"
    assert await store.rows(totals) == [(4_000.0, 3_900_000, 100_000)]


async def test_samples_of_this_hour_are_counted_without_being_told(store: Store) -> None:
    clock = SystemClock()
    now = msgspec.structs.replace(SAMPLE_ROWS[0], sampled_ns=clock.now_ns())
    await store.insert(WORKER_SAMPLES, WORKER_SAMPLES.to_columns([now], [1]), "now")
    await rollups(store).settle()
    assert await store.rows("SELECT sum(samples) FROM workers_by_minute FINAL") == [(1,)]


class AwayStore:
    """Store that is unreachable for a given number of calls."""

    def __init__(self, store: Store, num_failures: int) -> None:
        self._store = store
        self.num_failures = num_failures

    async def command(self, sql: str, parameters: Parameters | None = None) -> None:
        if self.num_failures:
            self.num_failures -= 1
            raise StoreUnavailableError("away")
        await self._store.command(sql, parameters)

    async def rows(self, sql: str, parameters: Parameters | None = None) -> list[tuple[Any, ...]]:
        return await self._store.rows(sql, parameters)


async def test_what_could_not_be_counted_is_not_forgotten(store: Store) -> None:
    away: Any = AwayStore(store, num_failures=1)
    await insert(store, REQUEST_ROWS, 1, "all")
    rollup = Rollups(away, SystemClock(), 1.0)
    rollup.touched(record.done_ns for record in REQUEST_ROWS)
    with pytest.raises(StoreUnavailableError):
        await rollup.settle()
    await rollup.settle()
    await check_equal(store)


def test_the_longer_a_round_takes_the_longer_it_rests(store: Store) -> None:
    rollup = rollups(store, interval_s=2.0)
    assert rollup.rest_s(0.01) == 2.0
    assert rollup.rest_s(0.1) == pytest.approx(4.9)
    assert rollup.rest_s(1.0) == 10.0
    assert rollup.rest_s(60.0) == 180.0


async def test_it_runs_by_its_interval_and_counts_once_more_when_told_to_stop(
    store: Store,
) -> None:
    clock = ManualClock()
    rollup = Rollups(store, clock, interval_s=2.0)
    task = asyncio.create_task(rollup.run())
    await eventually(lambda: clock.num_sleepers == 1)
    await insert(store, REQUEST_ROWS[:2], 1, "first")
    rollup.touched(record.done_ns for record in REQUEST_ROWS[:2])
    await clock.advance(2.0)
    await eventually(lambda: clock.num_sleepers == 1 and rollup.num_computed == 2)
    assert rollup.age_s == 0.0
    await insert(store, REQUEST_ROWS[2:], 3, "rest")
    rollup.touched(record.done_ns for record in REQUEST_ROWS[2:])
    rollup.stop()
    await task
    await check_equal(store)
