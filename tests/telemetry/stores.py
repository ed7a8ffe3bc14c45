"""An embedded store, emptied."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from millrace.schemas.config import ClickHouseConfig
from millrace.telemetry.store.migrate import migrate
from millrace.telemetry.store.store import Store

TABLES = (
    "requests",
    "deliveries",
    "worker_samples",
    "transcripts",
    "refusals",
    "usage_by_minute",
    "workers_by_minute",
    "prices",
    "outbox_ledger",
)


@asynccontextmanager
async def empty_store(path: Path) -> AsyncIterator[Store]:
    """The store of this process, with all its tables and no rows."""
    opened = await Store.open(ClickHouseConfig(path=str(path)))
    try:
        await migrate(opened)
        for table in TABLES:
            await opened.command(f"TRUNCATE TABLE {table}")
        yield opened
    finally:
        await opened.close()
