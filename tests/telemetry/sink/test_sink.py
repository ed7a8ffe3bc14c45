"""The sink's own promises: lag, catching up, rows that ClickHouse refuses, dead letters."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

import msgspec
import pytest
from aiokafka import TopicPartition

from millrace.bus import subjects
from millrace.bus.memory import MemoryBroker, MemoryBus
from millrace.runtime.clock import SystemClock
from millrace.schemas.config import KafkaConfig, TelemetryConfig
from millrace.schemas.records import TranscriptRecord
from millrace.telemetry.kafka.kafka import LARGEST_MESSAGE_BYTES
from millrace.telemetry.service import TelemetryService
from millrace.telemetry.sink.progress import RebalanceListener
from millrace.telemetry.sink.sink import Sink, sparse_rest_s
from millrace.telemetry.store.outbox_ledger import OutboxLedger
from millrace.telemetry.store.store import Store
from tests.support.manual_clock import ManualClock
from tests.support.waiting import eventually
from tests.telemetry.moody import MoodyStore
from tests.telemetry.pipeline import count, dead_letters, running
from tests.telemetry.records import NOW_NS, delivery_record, request_record
from tests.telemetry.stores import POLL_S

PARTITION = TopicPartition(subjects.REQUESTS_TOPIC, 0)
SECRET = "the words of somebody"


async def reached(service: TelemetryService, mark: int) -> None:
    """All of the outbox up to there is in ClickHouse or among the dead letters."""

    async def settled() -> bool:
        return await service.ledger.mark() == mark

    await eventually(settled, timeout_s=30, poll_s=POLL_S)


async def test_the_lag_is_seen_while_the_store_is_away_and_goes_back_to_nothing(
    store: Store, embedded_kafka: KafkaConfig
) -> None:
    moody = MoodyStore.over(store)
    moody.away = True
    bus = MemoryBus(MemoryBroker())
    async with running(bus, moody, embedded_kafka) as service:
        for number in range(300):
            await bus.outbox.publish(request_record(number))
        for number in range(20):
            await bus.outbox.publish(delivery_record(number))

        def behind() -> bool:
            lag = service.sink.lag()
            return (lag.get(subjects.REQUESTS_TOPIC), lag.get(subjects.DELIVERIES_TOPIC)) == (
                300,
                20,
            )

        await eventually(behind, what="all that Kafka holds is lag")
        assert (service.sink.num_stored, service.sink.last_stored_s) == (0, 0.0)
        moody.away = False
        await reached(service, 320)
        await eventually(lambda: not any(service.sink.lag().values()))
        assert service.sink.num_stored == 320
        assert service.sink.last_stored_s * 1e9 > NOW_NS


async def test_batches_grow_while_much_waits(store: Store, embedded_kafka: KafkaConfig) -> None:
    moody = MoodyStore.over(store)
    moody.away = True
    bus = MemoryBus(MemoryBroker())
    async with running(bus, moody, embedded_kafka, batch_rows=100) as service:
        for number in range(1_000):
            await bus.outbox.publish(request_record(number))
        await eventually(lambda: sum(service.sink.lag().values()) == 1_000)
        moody.away = False
        await reached(service, 1_000)
        # The first was gathered before anything was known of the lag.
        assert service.sink.num_batches <= 6
        assert service.sink.num_stored == 1_000


async def test_the_one_row_of_five_thousand_that_clickhouse_refuses(
    store: Store, embedded_kafka: KafkaConfig
) -> None:
    """The dead letter has ClickHouse's error, found by inserting halves of the batch."""
    moody = MoodyStore.over(store)
    await store.command("ALTER TABLE requests ADD CONSTRAINT test_rule CHECK user != 'bad'")
    bus = MemoryBus(MemoryBroker())
    for number in range(5_000):
        record = request_record(number)
        if number == 3_210:
            record = msgspec.structs.replace(record, user="bad")
        await bus.outbox.publish(record)
    try:
        async with running(bus, moody, embedded_kafka) as service:
            await reached(service, 5_000)
            num_batches = service.sink.num_batches
            assert (service.sink.num_stored, service.sink.num_dead) == (4_999, 1)
    finally:
        await store.command("ALTER TABLE requests DROP CONSTRAINT test_rule")
    assert await count(store) == 4_999
    [letter] = await dead_letters(embedded_kafka, 1)
    headers = dict(letter.headers)
    assert letter.key == request_record(3_210).request_id.encode()
    assert b"test_rule" in headers["reason"]
    assert headers["outbox-sequence"] == b"3211"
    # Two for each halving, and one for the ledger of each batch.
    assert moody.num_inserts <= 2 * 13 + 1 + 2 * num_batches


def test_the_rest_after_a_sparse_batch_follows_its_duration() -> None:
    assert sparse_rest_s(0.0, 0.5) == 0.0
    assert sparse_rest_s(0.02, 0.5) == pytest.approx(0.98)
    assert sparse_rest_s(1.0, 0.5) == pytest.approx(1.0)
    assert sparse_rest_s(2.0, 0.5) == 0.0


async def test_who_is_told_of_the_minutes_that_changed(
    store: Store, embedded_kafka: KafkaConfig
) -> None:
    reported: list[int] = []

    def on_stored(done_ns: Iterable[int]) -> None:
        reported.extend(done_ns)

    bus = MemoryBus(MemoryBroker())
    sink = Sink(
        msgspec.structs.replace(embedded_kafka, group="told"),
        TelemetryConfig(batch_interval_s=0.1),
        store,
        OutboxLedger(store),
        SystemClock(),
        on_stored,
    )
    async with running(bus, store, embedded_kafka) as service:
        task = asyncio.create_task(sink.run())
        for number in range(10):
            await bus.outbox.publish(request_record(number, done_ns=NOW_NS + number))
            await bus.outbox.publish(delivery_record(number))
        await reached(service, 20)
        await eventually(lambda: len(reported) >= 10)
        sink.stop()
        await task
    assert sorted(reported) == [NOW_NS + number for number in range(10)]


async def test_a_transcript_that_is_no_row_leaves_no_word_outside_its_topic(
    store: Store, embedded_kafka: KafkaConfig, caplog: pytest.LogCaptureFixture
) -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    broken = b"\x81\xa4type\xaatranscript" + SECRET.encode()
    broker.outbox.add("rec.transcript", broken, "broken")
    unfit = TranscriptRecord(
        request_id="r", tenant="t", model="m", prompt=SECRET, completion=SECRET, done_ns=-1
    )
    await bus.outbox.publish(unfit)
    with caplog.at_level(logging.DEBUG):
        async with running(bus, store, embedded_kafka) as service:
            await reached(service, 2)
    letters = await dead_letters(embedded_kafka, 2)
    for letter in letters:
        assert letter.value == b""
        headers = dict(letter.headers)
        assert headers["reason"] == b"a transcript does not fit its table"
        assert headers["origin-topic"] == subjects.TRANSCRIPTS_TOPIC.encode()
    assert SECRET not in caplog.text


async def test_a_transcript_lands_in_its_table(store: Store, embedded_kafka: KafkaConfig) -> None:
    bus = MemoryBus(MemoryBroker())
    record = TranscriptRecord(
        request_id="r", tenant="t", model="m", prompt="Why?", completion="So.", done_ns=NOW_NS
    )
    await bus.outbox.publish(record)
    async with running(bus, store, embedded_kafka) as service:
        await reached(service, 1)
    rows = await store.rows("SELECT request_id, tenant, prompt, completion FROM transcripts FINAL")
    assert rows == [("r", "t", "Why?", "So.")]


async def test_a_record_that_no_broker_would_take_does_not_stop_the_others(
    store: Store, embedded_kafka: KafkaConfig
) -> None:
    bus = MemoryBus(MemoryBroker(max_payload_bytes=2_000_000))
    large = "x" * (LARGEST_MESSAGE_BYTES + 1)
    await bus.outbox.publish(msgspec.structs.replace(request_record(0), user=large))
    for number in range(1, 11):
        await bus.outbox.publish(request_record(number))
    async with running(bus, store, embedded_kafka) as service:
        await reached(service, 11)
    assert await count(store) == 10
    [letter] = await dead_letters(embedded_kafka, 1)
    assert letter.value == b""
    assert b"the limit is 1000000" in dict(letter.headers)["reason"]


async def test_a_handover_waits_for_the_batch_in_hand() -> None:
    rebalance = RebalanceListener(SystemClock())
    await rebalance.on_partitions_revoked(set())
    seen = [rebalance.is_pending]
    await rebalance.on_partitions_assigned({PARTITION})
    seen.append(rebalance.is_pending)
    assert seen == [True, False]
    with rebalance.batch():
        revoking = asyncio.create_task(rebalance.on_partitions_revoked({PARTITION}))
        await asyncio.wait([revoking], timeout=0.05)
        assert not revoking.done()
    await revoking
    waiting = asyncio.create_task(rebalance.wait(5.0))
    await asyncio.wait([waiting], timeout=0.05)
    assert not waiting.done(), "nothing is read before the partitions are shared out anew"
    await rebalance.on_partitions_assigned({PARTITION})
    await waiting


async def test_a_group_that_fails_to_share_is_not_waited_for_for_ever() -> None:
    """A failed rebalance stops counting as pending within 60 s."""
    clock = ManualClock()
    rebalance = RebalanceListener(clock)
    seen = []
    for _ in range(2):
        await rebalance.on_partitions_revoked({PARTITION})
        seen.append(rebalance.is_pending)
        await clock.advance(60.0)
        seen.append(rebalance.is_pending)
    assert seen == [True, False, True, False]
