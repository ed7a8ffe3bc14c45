"""The store that tests share, and how they empty it."""

from __future__ import annotations

from millrace.schemas.config import RedisConfig
from millrace.telemetry.store.migrate import APPLIED
from millrace.telemetry.store.reading import StreamingReader
from millrace.telemetry.store.store import Store

# How often tests ask a store whether rows have come: each query costs some milliseconds of CPU.
POLL_S = 0.05
# Nothing listens there, so no test reads the budgets of a Redis that runs on this machine.
NO_REDIS = RedisConfig(url="redis://127.0.0.1:1/0")
_TABLES = """
SELECT name FROM system.tables
WHERE database = currentDatabase() AND engine LIKE '%MergeTree' AND name != {ledger:String}
"""


async def empty(store: Store) -> None:
    """Remove the rows of every table of the store except its ledger of migrations.

    ``TRUNCATE`` also clears the table's log of insertion tokens, so that tests may reuse a token.
    """
    for (table,) in await store.rows(_TABLES, {"ledger": APPLIED.name}):
        await store.command(f"TRUNCATE TABLE {table}")


def streaming(store: Store) -> StreamingReader:
    """The reader of an embedded store, which answers statements of users."""
    assert isinstance(store.reader, StreamingReader)
    return store.reader
