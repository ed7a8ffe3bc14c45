"""Storage of batches in the journal: the state of each, and the log of its progress."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import msgspec

from millrace.bus import subjects
from millrace.bus.store.objects import Journal, JournalConflictError
from millrace.gateway.errors import NotFoundError
from millrace.gateway.tenancy.identity import Caller
from millrace.schemas.batches.batches import Batch, BatchStatus
from millrace.schemas.errors import MillraceError

_ATTEMPTS = 20
_AT_ONCE = 500


class TooManyBatchesError(MillraceError, code="too_many_batches", http_status=429, retryable=True):
    """Batch beyond the tenant's limit of unfinished batches."""

    retry_after_s = 60.0

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"{limit} batches are not finished, which is the limit. Wait for one, or cancel one."
        )


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Batch, its caller, and its final status once that is decided."""

    batch: Batch
    caller: Caller
    outcome: BatchStatus | None = None


class PublishedLine(msgspec.Struct, frozen=True, array_like=True):
    """Log entry of a line with jobs in the queue: ``sequences`` in the order of choices.
    ``attempt`` counts from 0.
    """

    line: int
    attempt: int
    sequences: tuple[int, ...]


class FinishedLine(msgspec.Struct, frozen=True, array_like=True):
    """Log entry of an answered line: a line of the output file, or of the error file if it is not
    ``ok``. ``answer`` is empty if it is too long for the log: then it is an object of the batch.
    """

    line: int
    ok: bool
    answer: bytes


class LogEntry(msgspec.Struct, frozen=True, array_like=True):
    """Progress of one owner since its last entry."""

    published: tuple[PublishedLine, ...]
    finished: tuple[FinishedLine, ...]


class BatchStore:
    """States and logs of all batches. Errors of the journal are passed on."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._records = msgspec.msgpack.Decoder(BatchRecord)
        self._entries = msgspec.msgpack.Decoder(LogEntry)
        self._encoder = msgspec.msgpack.Encoder()

    # --- states ---

    async def create(self, record: BatchRecord, max_open: int) -> None:
        """Create a batch, which every gateway can see then and one will run. Raises
        TooManyBatchesError if the tenant then had more than ``max_open`` unfinished batches.
        """
        tenant, batch_id = record.caller.tenant, record.batch.id
        # This order leaves no batch without an owner, and none uncounted.
        await self._journal.append(subjects.open_batch(tenant, batch_id), b"", after=0)
        if len(await self.open_batches(tenant)) > max_open:
            await self._journal.drop(subjects.open_batch(tenant, batch_id))
            raise TooManyBatchesError(max_open)
        await self._journal.append(
            subjects.batch_state(tenant, batch_id), self._encoder.encode(record), after=0
        )

    async def get(self, tenant: str, batch_id: str) -> BatchRecord:
        """Return a batch. Raises NotFoundError, also for another tenant's batch."""
        return (await self._load(tenant, batch_id))[0]

    async def change(
        self, tenant: str, batch_id: str, change: Callable[[BatchRecord], BatchRecord]
    ) -> BatchRecord:
        """Change a batch atomically. ``change`` may be called again with the record of a concurrent
        writer; it returns its argument for no change. Raises NotFoundError.
        """
        for _ in range(_ATTEMPTS):
            record, sequence = await self._load(tenant, batch_id)
            changed = change(record)
            if changed == record:
                return record
            name = subjects.batch_state(tenant, batch_id)
            payload = self._encoder.encode(changed)
            try:
                await self._journal.append(name, payload, after=sequence, replace=True)
            except JournalConflictError:
                continue
            return changed
        raise JournalConflictError

    async def ids(self, tenant: str) -> list[str]:
        """Return the ids of all batches of a tenant, oldest first."""
        names = await self._journal.names(subjects.batch_state(tenant))
        return sorted(map(subjects.last_token, names))

    async def batches(self, tenant: str, batch_ids: list[str]) -> list[Batch]:
        """Return the existing batches, in the order of the ids."""
        found: list[Batch] = []
        for start in range(0, len(batch_ids), _AT_ONCE):
            names = [subjects.batch_state(tenant, one) for one in batch_ids[start:][:_AT_ONCE]]
            entries = await self._journal.last_of(names)
            found.extend(
                self._records.decode(entries[name].payload).batch
                for name in names
                if name in entries
            )
        return found

    async def _load(self, tenant: str, batch_id: str) -> tuple[BatchRecord, int]:
        entry = await self._journal.last(subjects.batch_state(tenant, batch_id))
        if entry is None:
            raise NotFoundError(f"There is no batch {batch_id!r:.100}.")
        return self._records.decode(entry.payload), entry.sequence

    # --- open batches ---

    async def open_batches(self, tenant: str | None = None) -> list[tuple[str, str]]:
        """Return (tenant, batch id) of unfinished batches, of one tenant or of all, oldest
        first.
        """
        pattern = subjects.open_batch(tenant)
        found = [subjects.open_batch_of(name) for name in await self._journal.names(pattern)]
        return sorted(found, key=lambda batch: batch[1])

    async def reader_of(self, tenant: str, file_id: str) -> str | None:
        """Return a batch that reads a file. An ended batch reads nothing, though it may be open for
        another moment.
        """
        ids = [batch_id for _, batch_id in await self.open_batches(tenant)]
        for batch in await self.batches(tenant, ids):
            if batch.input_file_id == file_id and not batch.status.is_final:
                return batch.id
        return None

    async def close(self, tenant: str, batch_id: str) -> None:
        """Close a batch that is finished or was never created, and delete its log."""
        await self._journal.drop(subjects.batch_log(batch_id))
        await self._journal.drop(subjects.open_batch(tenant, batch_id))

    # --- logs ---

    async def log(self, batch_id: str) -> AsyncIterator[tuple[int, LogEntry]]:
        """Yield every entry with its sequence."""
        name, last = subjects.batch_log(batch_id), 0
        while (entry := await self._journal.next(name, last)) is not None:
            last = entry.sequence
            yield last, self._entries.decode(entry.payload)

    async def append(self, batch_id: str, entry: LogEntry, after: int) -> int:
        """Append an entry; return its sequence. Raises JournalConflictError if another owner has
        written.
        """
        payload = self._encoder.encode(entry)
        return await self._journal.append(subjects.batch_log(batch_id), payload, after=after)
