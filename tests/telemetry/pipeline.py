"""Bridge and sink in the test's own process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiokafka import AIOKafkaConsumer, ConsumerRecord

from millrace.bus import subjects
from millrace.bus.api import Bus
from millrace.runtime.clock import SystemClock
from millrace.schemas.config import ClickHouseConfig, Config, KafkaConfig, TelemetryConfig
from millrace.telemetry.service import TelemetryService
from millrace.telemetry.store.store import Store
from tests.telemetry.stores import NO_REDIS


def config_of(kafka: KafkaConfig, batch_rows: int = 5_000) -> Config:
    return Config(
        kafka=kafka,
        redis=NO_REDIS,
        clickhouse=ClickHouseConfig(url="http://unused:1"),
        telemetry=TelemetryConfig(batch_rows=batch_rows, batch_interval_s=0.1),
    )


@asynccontextmanager
async def running(
    bus: Bus, store: Store, kafka: KafkaConfig, batch_rows: int = 5_000
) -> AsyncIterator[TelemetryService]:
    """A telemetry service over a store that the caller owns."""
    service = TelemetryService(config_of(kafka, batch_rows), store, SystemClock())
    task = asyncio.create_task(service.run(bus))
    try:
        yield service
    finally:
        service.stop()
        await task


async def count(store: Store, table: str = "requests") -> int:
    """Rows as an analyst counts them."""
    return int(await store.reader.read(f"SELECT count() FROM {table}", {}, "TSV"))


async def dead_letters(kafka: KafkaConfig, num_letters: int) -> list[ConsumerRecord]:
    """Wait for so many letters on the dead-letter topic, and return them."""
    consumer = AIOKafkaConsumer(
        subjects.DEAD_TOPIC,
        bootstrap_servers=kafka.bootstrap_servers,
        auto_offset_reset="earliest",
    )
    await consumer.start()
    letters: list[ConsumerRecord] = []
    try:
        async with asyncio.timeout(10.0):
            while len(letters) < num_letters:
                for messages in (await consumer.getmany(timeout_ms=1000)).values():
                    letters += messages
    finally:
        await consumer.stop()
    return letters
