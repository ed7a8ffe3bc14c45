"""kill -9 of the telemetry process in mid-flight: no record missing, none doubled."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import nats
import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition

from millrace.bus import subjects
from millrace.bus.nats import NatsBus, connect
from millrace.bus.nats.permissions import Part
from millrace.schemas.config import KafkaConfig, NatsConfig
from millrace.telemetry.kafka.embedded import EmbeddedKafka
from tests.support.servers import NatsServer
from tests.support.waiting import eventually
from tests.telemetry.process import TelemetryProcess
from tests.telemetry.records import request_record
from tests.telemetry.stores import POLL_S

NUM_LIVES = 2
NUM_RECORDS = 1_200


@pytest.fixture
async def bus(nats_server: NatsServer) -> AsyncIterator[NatsBus]:
    connected = await connect(NatsConfig(url=nats_server.url), "test", part=Part.SCHEDULER)
    yield connected
    await connected.close()


async def publish(bus: NatsBus, first: int, last: int, pause_s: float = 0.0) -> None:
    for start in range(first, last, 50):
        records = [request_record(number) for number in range(start, min(start + 50, last))]
        await asyncio.gather(*(bus.outbox.publish(record) for record in records))
        await asyncio.sleep(pause_s)


async def all_landed(process: TelemetryProcess, num_records: int) -> None:
    async def landed() -> bool:
        return await process.sql("SELECT uniqExact(request_id) FROM requests") == str(num_records)

    await eventually(landed, timeout_s=30, what=f"{num_records} in ClickHouse", poll_s=POLL_S)
    counts = await process.sql(
        "SELECT count(), sum(prompt_tokens), (SELECT count() FROM requests_once), "
        "(SELECT count() FROM requests FINAL) FROM requests"
    )
    tokens = sum(request_record(number).prompt_tokens for number in range(num_records))
    assert counts == f"{num_records}\t{tokens}\t{num_records}\t{num_records}"


async def test_killed_again_and_again(
    bus: NatsBus, nats_server: NatsServer, tmp_path: Path
) -> None:
    kafka = EmbeddedKafka()
    process = TelemetryProcess(
        tmp_path, nats_server.url, KafkaConfig(bootstrap_servers=kafka.bootstrap_servers)
    )
    draw = random.Random(5)
    for first in range(0, NUM_RECORDS, NUM_RECORDS // NUM_LIVES):
        process.start()
        await process.answers()
        publishing = asyncio.create_task(
            publish(bus, first, first + NUM_RECORDS // NUM_LIVES, pause_s=0.05)
        )

        # In mid-flight: part of what it pulled is in Kafka, part in ClickHouse, part nowhere.
        async def moves(first: int = first) -> bool:
            newest = await process.sql("SELECT max(request_id) FROM requests")
            return newest >= request_record(first).request_id

        await eventually(moves, timeout_s=20, poll_s=POLL_S)
        await asyncio.sleep(draw.random() * 0.4)
        process.kill()
        await publishing
    process.start()
    await process.answers()
    await all_landed(process, NUM_RECORDS)
    assert process.stop() == 0
    kafka.close()


async def test_telemetry_and_kafka_die_together(
    bus: NatsBus, nats_server: NatsServer, tmp_path: Path
) -> None:
    """The embedded Kafka returns empty at another address, and the bridge replays its records."""
    # The sink is kept waiting, so that what dies is in Kafka, acknowledged, and nowhere else.
    process = TelemetryProcess(tmp_path, nats_server.url, KafkaConfig(), batch_interval_s=5.0)
    for life in range(1, 3):
        kafka = EmbeddedKafka()
        process.use(kafka)
        process.start()
        await process.answers()
        await publish(bus, (life - 1) * 300, life * 300)
        await kafka_has(kafka, life * 300)
        await outbox_is_acknowledged(nats_server)
        assert await process.sql("SELECT count() FROM requests") == "0"
        process.kill()
        kafka.close()
    kafka = EmbeddedKafka()
    process.use(kafka)
    process.start()
    await process.answers()
    await all_landed(process, 600)
    assert process.stop() == 0
    kafka.close()


async def outbox_is_acknowledged(nats_server: NatsServer) -> None:
    """Wait until the bridge has acknowledged all sent records to the outbox."""
    client = await nats.connect(nats_server.url)

    async def done() -> bool:
        consumer = await client.jetstream().consumer_info(
            subjects.OUTBOX_STREAM, subjects.BRIDGE_CONSUMER
        )
        return (consumer.num_ack_pending, consumer.num_pending) == (0, 0)

    await eventually(done, timeout_s=20, what="the outbox is acknowledged")
    await client.close()


async def kafka_has(kafka: EmbeddedKafka, num_records: int) -> None:
    """Wait until the bridge has sent that many."""
    consumer = AIOKafkaConsumer(bootstrap_servers=kafka.bootstrap_servers)
    await consumer.start()
    partitions = [TopicPartition(subjects.REQUESTS_TOPIC, number) for number in range(4)]

    async def sent() -> bool:
        ends: dict[TopicPartition, int] = await consumer.end_offsets(partitions)
        return sum(ends.values()) == num_records

    await eventually(sent, timeout_s=20, what=f"{num_records} records in Kafka")
    await consumer.stop()


async def test_it_stops_in_time_while_kafka_is_away(
    bus: NatsBus, nats_server: NatsServer, tmp_path: Path
) -> None:
    kafka = EmbeddedKafka()
    process = TelemetryProcess(tmp_path, nats_server.url, KafkaConfig())
    process.use(kafka)
    process.start()
    await process.answers()
    await publish(bus, 0, 50)
    await all_landed(process, 50)
    kafka.close()
    await publish(bus, 50, 100)
    assert process.stop() == 0
    # What Kafka could not take is in the outbox still.
    kafka = EmbeddedKafka()
    process.use(kafka)
    process.start()
    await process.answers()
    await all_landed(process, 100)
    assert process.stop() == 0
    kafka.close()


async def test_nats_restarts_under_a_running_process(
    bus: NatsBus, nats_server: NatsServer, tmp_path: Path
) -> None:
    kafka = EmbeddedKafka()
    process = TelemetryProcess(
        tmp_path, nats_server.url, KafkaConfig(bootstrap_servers=kafka.bootstrap_servers)
    )
    process.start()
    await process.answers()
    await publish(bus, 0, 100)
    await all_landed(process, 100)
    nats_server.kill()
    nats_server.start()

    async def connected() -> bool:
        return bus.connected

    await eventually(connected, timeout_s=20)
    await publish(bus, 100, 200)
    await all_landed(process, 200)
    assert process.stop() == 0
    kafka.close()
