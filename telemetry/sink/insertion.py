"""Insertion of rows into a table, with retries while the store is unreachable and isolation of
rejected rows."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from millrace.runtime.clock import Clock
from millrace.runtime.histogram import DURATION_S, ROWS, Histogram
from millrace.runtime.retry import doubling_delays, retry
from millrace.runtime.tasks import wait_or_sleep
from millrace.telemetry.sink.batches import Row, content_token
from millrace.telemetry.store.store import RejectedRowsError, Store, StoreUnavailableError
from millrace.telemetry.store.tables import TABLES, Table

logger = logging.getLogger(__name__)

_RETRY_FIRST_S = 0.2
_RETRY_MOST_S = 5.0


class Inserts:
    """Durations and row counts of a table's inserts."""

    def __init__(self) -> None:
        self.took_s = Histogram(DURATION_S)
        self.rows = Histogram(ROWS)


class Insertion:
    """Writer that retries until the store accepts; ``stop`` ends the waiting.

    ``tables`` has the successful inserts by table; ``num_failures`` counts retried writes;
    ``is_full`` while the store refuses for lack of disk space.
    """

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._stopping = asyncio.Event()
        self.num_failures = 0
        self.is_full = False
        self.tables = {table.name: Inserts() for table in TABLES}

    def stop(self) -> None:
        """Stop retrying: from now on a failed write raises StoreUnavailableError."""
        self._stopping.set()

    async def insert(self, table: Table[Any], rows: Sequence[Row]) -> list[tuple[Row, str]]:
        """Insert all acceptable rows; return the rejected rows, each with the reason.

        One rejected row among n costs about 2 log n inserts: rejected batches are halved
        repeatedly.
        """
        try:
            await self._insert_whole(table, rows)
        except RejectedRowsError as error:
            if len(rows) == 1:
                return [(rows[0], error.message)]
            middle = len(rows) // 2
            return [
                *await self.insert(table, rows[:middle]),
                *await self.insert(table, rows[middle:]),
            ]
        return []

    async def until_stored(self, write: Callable[[], Awaitable[None]]) -> None:
        """Retry until ClickHouse accepts the write; meanwhile Kafka keeps new records."""
        delays = doubling_delays(_RETRY_FIRST_S, _RETRY_MOST_S)
        rest = partial(wait_or_sleep, self._stopping, self._clock)
        await retry(write, delays, rest, retried=self._retried)
        self.is_full = False

    def _retried(self, error: Exception) -> bool:
        if not isinstance(error, StoreUnavailableError):
            return False
        self.num_failures += 1
        self.is_full = error.is_full
        if not self._stopping.is_set():
            logger.warning(
                "ClickHouse is unreachable; trying again", extra={"reason": error.message}
            )
        return not self._stopping.is_set()

    async def _insert_whole(self, table: Table[Any], rows: Sequence[Row]) -> None:
        # In a thread, since it takes as long as a thousand messages take to arrive.
        columns = await asyncio.to_thread(_columns, table, rows)
        token = content_token(rows)

        async def write() -> None:
            started_s = self._clock.monotonic()
            await self._store.insert(table, columns, token)
            inserts = self.tables[table.name]
            inserts.took_s.add(self._clock.monotonic() - started_s)
            inserts.rows.add(len(rows))

        await self.until_stored(write)


def _columns(table: Table[Any], rows: Sequence[Row]) -> list[list[Any]]:
    try:
        return table.to_columns([row.record for row in rows], [row.sequence for row in rows])
    except (ArithmeticError, TypeError, ValueError) as error:
        raise RejectedRowsError(f"the rows do not fit {table.name}: {error}") from error
