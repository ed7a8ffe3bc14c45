"""Idle telemetry process: it queries and writes nothing."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer

from millrace.bus import subjects
from millrace.bus.memory import MemoryBroker, MemoryBus
from millrace.runtime.clock import SystemClock
from millrace.schemas.config import KafkaConfig
from millrace.telemetry.rollups.rollups import Rollups
from millrace.telemetry.store.store import Store
from millrace.telemetry.store.tables import REQUESTS
from tests.support.manual_clock import ManualClock
from tests.support.waiting import eventually
from tests.telemetry.pipeline import count, running
from tests.telemetry.records import request_record


class CountingStore:
    """Store that counts its queries."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.num_asked = 0

    def __getattr__(self, name: str) -> Any:
        self.num_asked += 1
        return getattr(self._store, name)


async def test_the_store_is_asked_nothing_until_something_is_stored(store: Store) -> None:
    counting: Any = CountingStore(store)
    clock = ManualClock()
    rollup = Rollups(counting, clock, interval_s=2.0)
    task = asyncio.create_task(rollup.run())
    await eventually(lambda: rollup.age_s is not None and clock.num_sleepers == 1)
    num_asked = counting.num_asked
    for _ in range(590):
        await clock.advance(1.0)
    assert counting.num_asked == num_asked
    assert rollup.age_s == 0.0
    records = [request_record(1)]
    await store.insert(REQUESTS, REQUESTS.to_columns(records, [1]), "one")
    rollup.touched(record.done_ns for record in records)
    await eventually(lambda: rollup.num_computed == 1)
    rollup.stop()
    await task


async def test_a_failed_round_is_not_taken_for_rest(store: Store) -> None:
    counting: Any = CountingStore(store)
    clock = ManualClock()
    rollup = Rollups(counting, clock, interval_s=2.0)
    await rollup.settle()
    num_asked = counting.num_asked
    await rollup.settle()
    assert counting.num_asked == num_asked
    rollup.sampled()
    await clock.advance(7.0)
    assert rollup.age_s == 7.0
    await rollup.settle()
    assert (counting.num_asked, rollup.age_s) == (num_asked + 1, 0.0)


async def test_a_record_ends_the_rest_of_bridge_and_sink(
    store: Store, embedded_kafka: KafkaConfig
) -> None:
    bus = MemoryBus(MemoryBroker())
    async with running(bus, store, embedded_kafka) as service:

        async def is_at_rest_after(num_records: int) -> bool:
            has_landed = await count(store) == num_records
            waits = service.bridge is not None and service.bridge.is_waiting
            return has_landed and waits and service.sink.is_resting

        for number in range(2):
            await bus.outbox.publish(request_record(number))
            await eventually(partial(is_at_rest_after, number + 1), timeout_s=20.0)
            assert service.sink.lag()[subjects.REQUESTS_TOPIC] == 0


async def test_a_record_ends_a_rest_that_unassigned_its_partitions(
    store: Store,
    embedded_kafka: KafkaConfig,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    unassigned = asyncio.Event()
    unsubscribe = AIOKafkaConsumer.unsubscribe

    def unassigning(self: AIOKafkaConsumer) -> None:
        unsubscribe(self)
        unassigned.set()

    monkeypatch.setattr(AIOKafkaConsumer, "unsubscribe", unassigning)
    monkeypatch.setattr("millrace.telemetry.sink.sink._SHORT_REST_S", 0.05)
    bus = MemoryBus(MemoryBroker())
    async with running(bus, store, embedded_kafka) as service:
        for number in range(3):
            await asyncio.wait_for(unassigned.wait(), 20.0)
            unassigned.clear()
            assert service.sink.is_resting
            await bus.outbox.publish(request_record(number))
            await eventually(partial(_has_rows, store, number + 1), timeout_s=20.0)
    assert "a task failed" not in caplog.text


async def _has_rows(store: Store, num_rows: int) -> bool:
    return await count(store) == num_rows


async def test_it_stops_in_the_middle_of_its_rest(
    store: Store, embedded_kafka: KafkaConfig
) -> None:
    bus = MemoryBus(MemoryBroker())
    clock = SystemClock()
    async with running(bus, store, embedded_kafka) as service:
        await eventually(lambda: service.sink.is_resting)
        began_s = clock.monotonic()
    assert clock.monotonic() - began_s < 3.0
