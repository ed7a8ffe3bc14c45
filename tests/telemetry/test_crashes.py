"""kill -9 of the telemetry process in mid-flight: no record missing, none doubled."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bus.nats import NatsBus, connect
from schemas.config import KafkaConfig, NatsConfig
from telemetry.embedded_kafka import EmbeddedKafka
from tests.support.servers import NatsServer
from tests.support.waiting import eventually
from tests.telemetry.process import TelemetryProcess
from tests.telemetry.records import request_record

NUM_RECORDS = 3_000


@pytest.fixture
async def bus(nats_server: NatsServer) -> AsyncIterator[NatsBus]:
    connected = await connect(NatsConfig(url=nats_server.url), "test")
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

    await eventually(landed, timeout_s=30, what=f"{num_records} requests in ClickHouse")
    counts = await process.sql(
        "SELECT count(), sum(prompt_tokens), (SELECT count() FROM requests_once), "
        "(SELECT count() FROM requests FINAL) FROM requests"
    )
    tokens = sum(request_record(number).prompt_tokens for number in range(num_records))
    assert counts == f"{num_records}\t{tokens}\t{num_records}\t{num_records}"


@pytest.mark.slow
async def test_killed_again_and_again(
    bus: NatsBus, nats_server: NatsServer, tmp_path: Path
) -> None:
    kafka = EmbeddedKafka()
    process = TelemetryProcess(
        tmp_path, nats_server.url, KafkaConfig(bootstrap_servers=kafka.bootstrap_servers)
    )
    draw = random.Random(5)
    publishing = asyncio.create_task(publish(bus, 0, NUM_RECORDS, pause_s=0.1))
    for round_number in range(5):
        process.start()
        await process.answers()
        seen = await process.sql("SELECT count() FROM requests")
        if round_number < 4:
            # In mid-flight: part of what it pulled is in Kafka, part in ClickHouse, part nowhere.
            async def moves(seen: str = seen) -> bool:
                return await process.sql("SELECT count() FROM requests") != seen

            await eventually(moves, timeout_s=20)
            await asyncio.sleep(draw.random() * 0.3)
            process.kill()
    await publishing
    await all_landed(process, NUM_RECORDS)
    assert process.stop() == 0
    kafka.close()


@pytest.mark.slow
async def test_telemetry_and_kafka_die_together(
    bus: NatsBus, nats_server: NatsServer, tmp_path: Path
) -> None:
    """The embedded Kafka comes back empty, at another address; what it held is replayed."""
    process = TelemetryProcess(tmp_path, nats_server.url, KafkaConfig())
    total = 0
    for _ in range(3):
        kafka = EmbeddedKafka()
        process.use(kafka)
        process.start()
        await process.answers()
        seen = await process.sql("SELECT count() FROM requests")
        await publish(bus, total, total + 700)
        total += 700

        async def moves(seen: str = seen) -> bool:
            return await process.sql("SELECT count() FROM requests") != seen

        await eventually(moves, timeout_s=20)
        process.kill()
        kafka.close()
    kafka = EmbeddedKafka()
    process.use(kafka)
    process.start()
    await process.answers()
    await all_landed(process, total)
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
