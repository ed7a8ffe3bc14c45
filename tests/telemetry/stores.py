"""The tables that tests empty."""

from __future__ import annotations

from millrace.telemetry.store.reading import StreamingReader
from millrace.telemetry.store.store import Store

# How often tests ask a store whether rows have come: each query costs some milliseconds of CPU.
POLL_S = 0.05
TABLES = (
    "requests",
    "deliveries",
    "worker_samples",
    "transcripts",
    "refusals",
    "usage_by_minute",
    "workers_by_minute",
    "generation_rows",
    "prices",
    "outbox_ledger",
)


async def empty(store: Store) -> None:
    """Take all rows out of the store's tables, and leave its ledger of migrations."""
    for table in TABLES:
        await store.command(f"TRUNCATE TABLE {table}")


def streaming(store: Store) -> StreamingReader:
    """The reader of an embedded store, which answers statements of users."""
    assert isinstance(store.reader, StreamingReader)
    return store.reader
