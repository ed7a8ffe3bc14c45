"""Which places of the outbox have landed in ClickHouse, and the mark below which all have.

Kafka's partitions are consumed out of order, so the highest sequence in a table says nothing about
those below it. The ledger keeps ranges; a range is written after its rows and before Kafka's
offsets are committed, so a sequence in the ledger is in the tables (or in the dead-letter topic).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from millrace.telemetry.store.store import PlainTable, Store

Range = tuple[int, int]
TABLE = PlainTable("outbox_ledger", ("first_sequence", "last_sequence"), ("UInt64", "UInt64"))

# How far the ranges before each one reach together; the first that begins behind that leaves a gap.
# A backlog leaves hundreds of thousands of ranges, so they are not brought here.
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
    """The same sequences in the fewest ranges, in order."""
    merged: list[Range] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return merged


class OutboxLedger:
    """The ledger of one store. Nothing is kept in memory: several sinks may write to it."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def add(self, sequences: Sequence[int]) -> None:
        """These have landed. Raises StoreUnavailableError."""
        ranges = merge((sequence, sequence) for sequence in sequences)
        await self._insert(ranges)

    async def void(self, first: int, last: int) -> None:
        """These are not in the outbox any more, and will never land."""
        await self._insert([(first, last)])

    async def mark(self) -> int:
        """Every sequence up to this one has landed; 0 when that is not even true of the first."""
        [[mark]] = await self._store.rows(_MARK)
        return int(mark)

    async def is_empty(self) -> bool:
        """Whether nothing has landed yet."""
        [[num_ranges]] = await self._store.rows("SELECT count() FROM outbox_ledger")
        return int(num_ranges) == 0

    async def compact(self) -> None:
        """Rewrite the ranges below the mark as one."""
        mark = await self.mark()
        if not mark:
            return
        # First the wide range, then the deletion: at no time does anything look missing.
        await self._insert([(1, mark)])
        await self._store.command(
            "DELETE FROM outbox_ledger WHERE first_sequence > 1 AND last_sequence <= {mark:UInt64}",
            {"mark": mark},
        )

    async def clear(self) -> None:
        """Forget all: the outbox has been made anew and counts from 1 again."""
        await self._store.command("TRUNCATE TABLE outbox_ledger")

    async def _insert(self, ranges: Sequence[Range]) -> None:
        token = hashlib.blake2b(repr(ranges).encode(), digest_size=16).hexdigest()
        columns = ([first for first, _ in ranges], [last for _, last in ranges])
        await self._store.insert(TABLE, columns, token)
