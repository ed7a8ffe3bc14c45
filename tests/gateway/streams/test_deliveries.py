"""Delivery records whose publishing fails with an unforeseen error."""

from __future__ import annotations

import pytest

from millrace.bus.memory import MemoryBroker, MemoryBus
from millrace.gateway.streams.deliveries import Deliveries
from millrace.runtime.faults.failures import Failures, note_in
from millrace.schemas.jobs import Source
from millrace.schemas.records import DeliveryRecord, Record
from tests.support.manual_clock import ManualClock


def record_of(number: int) -> DeliveryRecord:
    return DeliveryRecord(request_id=f"r{number}", gateway_id="g", tenant="t", source=Source.HTTP)


async def test_senders_survive_a_failing_publish(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    bus = MemoryBus(MemoryBroker(clock))
    failures = Failures(clock)
    note_in(failures)
    publish = bus.outbox.publish
    sent: list[str] = []

    async def publish_some(record: Record, linger_s: float = 0.0) -> None:
        assert isinstance(record, DeliveryRecord)
        sent.append(record.request_id)
        if len(sent) % 3 == 0:
            raise AttributeError("'NoneType' object has no attribute 'write'")
        await publish(record, linger_s)

    monkeypatch.setattr(bus.outbox, "publish", publish_some)
    deliveries = Deliveries(bus.outbox, clock)
    deliveries.start()
    for number in range(12):
        deliveries.put(record_of(number))
        await clock.advance(16)
    assert sent == [f"r{number}" for number in range(12)]
    assert deliveries.num_lost == 4
    assert await bus.outbox.last_sequence() == 8
    assert not failures.trouble
    await deliveries.close(0.0)
