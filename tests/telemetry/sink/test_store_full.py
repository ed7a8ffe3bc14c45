"""ClickHouse and Kafka on disks that are full: records wait, and land once when there is room."""

from __future__ import annotations

import asyncio
import contextlib
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from millrace.bus.api import Bus
from millrace.bus.memory import MemoryBroker, MemoryBus
from millrace.bus.nats import connect
from millrace.bus.nats.permissions import Part
from millrace.runtime.addresses import open_directly
from millrace.schemas.config import KafkaConfig, MetricsConfig, NatsConfig
from millrace.schemas.control import WorkerStatus
from millrace.telemetry.metrics import TelemetryMetrics
from millrace.telemetry.store.store import Store
from tests.support.kafka import KafkaBroker, missing_tool
from tests.support.scraped import scrape_of
from tests.support.servers import NatsServer, free_port
from tests.support.small_disk import SmallDisk, small_disk
from tests.support.waiting import eventually
from tests.telemetry.pipeline import count, running
from tests.telemetry.process import TelemetryProcess
from tests.telemetry.records import request_record
from tests.telemetry.stores import POLL_S

_WITHIN_S = 60.0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", size_mib=160) as mounted:
        yield mounted


async def publish(bus: Bus, first: int, last: int) -> None:
    await asyncio.gather(
        *(bus.outbox.publish(request_record(number)) for number in range(first, last))
    )


async def shown(port: int, path: str) -> str:
    """Return the body at a path of a metrics port for any status; empty if there is no answer."""

    def get() -> str:
        try:
            with open_directly(f"http://127.0.0.1:{port}/{path}", timeout_s=5.0) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            return error.read().decode()

    with contextlib.suppress(OSError):
        return await asyncio.to_thread(get)
    return ""


async def test_clickhouse_has_no_room(
    disk: SmallDisk, nats_server: NatsServer, embedded_kafka: KafkaConfig
) -> None:
    bus = await connect(NatsConfig(url=nats_server.url), "test", part=Part.SCHEDULER)
    process = TelemetryProcess(disk.path, nats_server.url, embedded_kafka)
    metrics = MetricsConfig(port=free_port())
    process.config = msgspec.structs.replace(process.config, metrics=metrics)
    process.start()
    try:
        await process.answers()

        async def landed(num_records: int) -> None:
            async def all_there() -> bool:
                counts = await process.sql(
                    "SELECT uniqExact(request_id), (SELECT count() FROM requests_once) "
                    "FROM requests"
                )
                return counts == f"{num_records}\t{num_records}"

            await eventually(all_there, _WITHIN_S, f"{num_records} in ClickHouse", POLL_S)

        async def named() -> bool:
            return "clickhouse refuses rows because its disk is full" in await shown(
                metrics.port, "healthz"
            )

        async def well() -> bool:
            return '"ok"' in await shown(metrics.port, "healthz")

        await publish(bus, 0, 50)
        await landed(50)
        disk.fill()
        await publish(bus, 50, 300)
        await eventually(named, _WITHIN_S, "health names the store", POLL_S)
        told = await shown(metrics.port, "metrics")
        assert 'millrace_store_healthy{store="clickhouse"} 0.0' in told
        disk.make_room()
        await landed(300)
        await eventually(well, _WITHIN_S, "health is well", POLL_S)
    finally:
        process.stop()
        await bus.close()


@pytest.mark.kafka
@pytest.mark.timeout(240)
@pytest.mark.skipif(missing_tool() is not None, reason=f"{missing_tool()} is not installed")
async def test_kafka_has_no_room(store: Store, disk: SmallDisk) -> None:
    """A broker ends when its only disk is full: records wait in the outbox until it is back."""
    broker = KafkaBroker(disk.path / "kafka")
    broker.start()
    bus = MemoryBus(MemoryBroker())
    try:
        kafka = KafkaConfig(bootstrap_servers=broker.bootstrap_servers, partitions=1)
        async with running(bus, store, kafka) as service:

            async def landed(num_records: int) -> None:
                async def all_there() -> bool:
                    return await count(store, "requests_once") == num_records

                await eventually(all_there, _WITHIN_S, f"{num_records} in ClickHouse", POLL_S)

            await publish(bus, 0, 50)
            await landed(50)
            disk.fill()
            await publish(bus, 50, 300)
            await eventually(
                lambda: "kafka" in service.stores.troubles(), _WITHIN_S, "health names the store"
            )
            assert service.bridge is not None
            await eventually(lambda: service.bridge is not None and service.bridge.num_waiting > 0)
            broker.kill()
            disk.make_room()
            broker.start()
            await landed(300)
            await eventually(lambda: service.stores.troubles() == {}, _WITHIN_S)
    finally:
        broker.stop()


async def test_records_that_did_not_get_into_the_outbox_are_counted_as_waiting(
    store: Store, embedded_kafka: KafkaConfig
) -> None:
    """A worker holds on to requests that are over until their records are stored."""
    bus = MemoryBus(MemoryBroker())
    waiting = "millrace_telemetry_outbox_waiting_records"
    async with running(bus, store, embedded_kafka) as service:
        metrics = TelemetryMetrics(service)
        for num_ending in (73, 0):

            async def is_reported(num_ending: int = num_ending) -> bool:
                status = WorkerStatus(
                    worker_id="w", name="w", model="m", max_num_sequences=8, num_ending=num_ending
                )
                await bus.workers.announce(status)
                scraped = scrape_of(metrics)
                return waiting in scraped.sample_names and scraped.value(waiting) == num_ending

            await eventually(is_reported)
