"""Records from the outbox through Kafka into ClickHouse, each exactly once."""

from __future__ import annotations

from decimal import Decimal

import msgspec

from millrace.bus.memory import MemoryBroker, MemoryBus
from millrace.schemas.config import KafkaConfig
from millrace.telemetry.kafka.embedded import EmbeddedKafka
from millrace.telemetry.store.store import Store
from tests.support.waiting import eventually
from tests.telemetry.pipeline import count, dead_letters, running
from tests.telemetry.records import NOW_NS, delivery_record, request_record, worker_sample
from tests.telemetry.stores import POLL_S


async def test_records_of_every_kind_land_once(store: Store, embedded_kafka: KafkaConfig) -> None:
    bus = MemoryBus(MemoryBroker())
    for number in range(500):
        await bus.outbox.publish(request_record(number))
    for number in range(20):
        await bus.outbox.publish(delivery_record(number))
        await bus.outbox.publish(worker_sample(number, sampled_ns=NOW_NS + number * 10**9))
    async with running(bus, store, embedded_kafka) as service:

        async def landed() -> bool:
            return await service.ledger.mark() == 540

        await eventually(landed, timeout_s=20, poll_s=POLL_S)
    assert await count(store) == 500
    assert await count(store, "deliveries") == 20
    assert await count(store, "worker_samples") == 20
    raw = await store.rows("SELECT count() FROM requests")
    assert raw == [(500,)], "not even doubled before the merge"


async def test_a_row_says_what_its_record_said(store: Store, embedded_kafka: KafkaConfig) -> None:
    bus = MemoryBus(MemoryBroker())
    record = msgspec.structs.replace(request_record(7), cost=Decimal("0.000001234567"))
    shed = msgspec.structs.replace(
        request_record(8),
        status="shed",
        started_ns=0,
        first_token_ns=0,
        completion_tokens=0,
        error_code="queue_full",
    )
    await bus.outbox.publish(record)
    await bus.outbox.publish(shed)
    async with running(bus, store, embedded_kafka):

        async def landed() -> bool:
            return await count(store) == 2

        await eventually(landed, timeout_s=20, poll_s=POLL_S)
    rows = await store.rows(
        "SELECT session, worker, cost, ttft_ms, completion_tokens, outbox_sequence, "
        "toUnixTimestamp64Micro(received_at), toUnixTimestamp64Micro(first_token_at) "
        "FROM requests ORDER BY request_id"
    )
    assert rows[0] == (
        record.session_id,
        record.worker_id,
        Decimal("0.000001234567"),
        record.ttft_ms,
        record.completion_tokens,
        1,
        record.received_ns // 1000,
        record.first_token_ns // 1000,
    )
    assert rows[1][3] is None
    assert rows[1][7] is None


async def test_what_is_unknown_is_null_and_a_zero_that_was_measured_stays(
    store: Store, embedded_kafka: KafkaConfig
) -> None:
    bus = MemoryBus(MemoryBroker())
    seen = msgspec.structs.replace(delivery_record(1), intake_ms=0.5, longest_gap_ms=20.0)
    unseen = msgspec.structs.replace(delivery_record(2), first_byte_ms=0.0, tokens_delivered=0)
    idle = msgspec.structs.replace(
        worker_sample(1, worker="gpu"),
        num_steps=0,
        step_ms_mean=0.0,
        num_free_blocks=0,
        device_name="H100",
        device_share=0.0,
        device_memory_total_bytes=80,
    )
    foreign = msgspec.structs.replace(
        worker_sample(2, worker="server"), num_blocks=0, num_free_blocks=0, step_ms_mean=8.0
    )
    for record in (seen, unseen, idle, foreign):
        await bus.outbox.publish(record)
    async with running(bus, store, embedded_kafka) as service:

        async def landed() -> bool:
            return await service.ledger.mark() == 4

        await eventually(landed, timeout_s=20, poll_s=POLL_S)
    assert await store.rows(
        "SELECT first_byte_ms, intake_ms, longest_gap_ms, stalled_ms FROM deliveries "
        "ORDER BY request_id"
    ) == [(12.5, 0.5, 20.0, 0.0), (None, None, None, 0.0)]
    assert await store.rows(
        "SELECT num_blocks, num_free_blocks, step_ms_mean, device_share, device_memory_bytes, "
        "device_memory_total_bytes FROM worker_samples ORDER BY worker"
    ) == [(1024, 0, None, 0.0, 0, 80), (None, None, 8.0, None, None, None)]


async def test_poison_goes_to_the_dead_letters_and_its_batch_lands(
    store: Store, embedded_kafka: KafkaConfig
) -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    for number in range(10):
        await bus.outbox.publish(request_record(number))
    broker.outbox.add("rec.request", b"\xc1 not a record", "poison-1")
    bad = msgspec.structs.replace(request_record(11), prompt_tokens=-1)
    await bus.outbox.publish(bad)
    broker.outbox.add("rec.other", b"x", "poison-2")
    for number in range(20, 30):
        await bus.outbox.publish(request_record(number))
    async with running(bus, store, embedded_kafka) as service:

        async def landed() -> bool:
            return await service.ledger.mark() == 23

        await eventually(landed, timeout_s=20, poll_s=POLL_S)
    assert await count(store) == 20
    letters = await dead_letters(embedded_kafka, 3)
    reasons = [dict(letter.headers)["reason"].decode() for letter in letters]
    assert any("prompt_tokens must be between" in reason for reason in reasons)
    assert any("rec.other" in reason for reason in reasons)


async def test_kafka_that_forgot_everything_is_filled_again(store: Store) -> None:
    bus = MemoryBus(MemoryBroker())
    first = EmbeddedKafka()
    for number in range(100):
        await bus.outbox.publish(request_record(number))
    async with running(bus, store, KafkaConfig(bootstrap_servers=first.bootstrap_servers)):

        async def all_landed() -> bool:
            return await count(store) == 100

        await eventually(all_landed, timeout_s=20, poll_s=POLL_S)
    # Bridged, acknowledged in the outbox, and then gone with Kafka before the sink had them.
    for number in range(100, 150):
        await bus.outbox.publish(request_record(number))
    held = await bus.outbox.pull(50, 1.0)
    await bus.outbox.ack(held)
    first.close()
    second = EmbeddedKafka()
    async with running(bus, store, KafkaConfig(bootstrap_servers=second.bootstrap_servers)):

        async def refilled() -> bool:
            return await count(store) == 150

        await eventually(refilled, timeout_s=20, poll_s=POLL_S)
    second.close()


async def test_what_a_dead_bridge_held_is_not_waited_for(
    store: Store, embedded_kafka: KafkaConfig
) -> None:
    bus = MemoryBus(MemoryBroker())
    async with running(bus, store, embedded_kafka):
        await bus.outbox.publish(request_record(0))

        async def one() -> bool:
            return await count(store) == 1

        await eventually(one, timeout_s=20, poll_s=POLL_S)
    for number in range(1, 11):
        await bus.outbox.publish(request_record(number))
    held = await bus.outbox.pull(5, 1.0)
    assert len(held) == 5, "leased to a bridge that is no more, for half a minute"
    async with running(bus, store, embedded_kafka):

        async def all_landed() -> bool:
            return await count(store) == 11

        await eventually(all_landed, timeout_s=15, poll_s=POLL_S)
