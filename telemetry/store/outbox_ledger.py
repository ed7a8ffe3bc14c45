"""Ledger of the outbox: the sequences that have landed in ClickHouse, and the mark below which all
have.

Kafka's partitions are consumed out of order, so the highest sequence in a table says nothing about
lower ones. The ledger keeps ranges. A range is written after its rows and before Kafka's offsets
are committed, so a sequence in the ledger is in the tables (or in the dead-letter topic).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from millrace.telemetry.store.store import PlainTable, Store

Range = tuple[int, int]
TABLE = PlainTable("outbox_ledger", ("first_sequence", "last_sequence"), ("UInt64", "UInt64"))

# Finds the furthest end of the ranges before each range; the first range that begins after it
# leaves a gap. This runs in the store, since a backlog leaves hundreds of thousands of ranges.
_MARK = """
SELECT if(countIf(first_sequence > reach + 1) = 0, max(last_sequence),
          minIf(reach, first_sequence > reach + 1))
FROM
(
    SELECT first_sequence, last_sequence, max(last_sequence) OVER (
        ORDER BY first_sequence, last_sequence ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
    ) AS reach
    FROM outbox_ledger
)
"""


def merge(ranges: Iterable[Range]) -> list[Range]:
    """Merge ranges into the fewest ranges, in order."""
    merged: list[Range] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return merged


class OutboxLedger:
    """Ledger of one store. It has no state in memory, so several sinks may write to it."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def add(self, sequences: Sequence[int]) -> None:
        """Add landed sequences. Raises StoreUnavailableError."""
        ranges = merge((sequence, sequence) for sequence in sequences)
        await self._insert(ranges)

    async def void(self, first: int, last: int) -> None:
        """Mark sequences that are no longer in the outbox and will never land."""
        await self._insert([(first, last)])

    async def mark(self) -> int:
        """Return the sequence up to which all have landed; 0 if the first has not."""
        [[mark]] = await self._store.rows(_MARK)
        return int(mark)

    async def is_empty(self) -> bool:
        """Return whether no sequence has landed yet."""
        [[num_ranges]] = await self._store.rows("SELECT count() FROM outbox_ledger")
        return int(num_ranges) == 0

    async def compact(self) -> None:
        """Rewrite the ranges below the mark as one."""
        mark = await self.mark()
        if not mark:
            return
        # Insert the wide range before the deletion, so that no sequence is ever missing.
        await self._insert([(1, mark)])
        await self._store.command(
            "DELETE FROM outbox_ledger WHERE first_sequence > 1 AND last_sequence <= {mark:UInt64}",
            {"mark": mark},
        )

    async def clear(self) -> None:
        """Delete all ranges: the outbox was recreated and counts from 1 again."""
        await self._store.command("TRUNCATE TABLE outbox_ledger")

    async def _insert(self, ranges: Sequence[Range]) -> None:
        token = hashlib.blake2b(repr(ranges).encode(), digest_size=16).hexdigest()
        columns = ([first for first, _ in ranges], [last for _, last in ranges])
        await self._store.insert(TABLE, columns, token)
