"""Bridge and sink in the test's own process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bus.api import Bus
from bus.clock import SystemClock
from schemas.config import ClickHouseConfig, Config, KafkaConfig, TelemetryConfig
from telemetry.service import TelemetryService
from telemetry.store import Store


def config_of(kafka: KafkaConfig) -> Config:
    return Config(
        kafka=kafka,
        clickhouse=ClickHouseConfig(url="http://unused:1"),
        telemetry=TelemetryConfig(batch_interval_s=0.1),
    )


@asynccontextmanager
async def running(bus: Bus, store: Store, kafka: KafkaConfig) -> AsyncIterator[TelemetryService]:
    """A telemetry service over a store that the caller owns."""
    service = TelemetryService(config_of(kafka), store, SystemClock())
    task = asyncio.create_task(service.run(bus))
    try:
        yield service
    finally:
        service.stop()
        await task


async def count(store: Store, table: str = "requests") -> int:
    """Rows as an analyst counts them."""
    return int(await store.reader.read(f"SELECT count() FROM {table}", {}, "TSV"))
