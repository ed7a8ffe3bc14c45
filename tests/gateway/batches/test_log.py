"""The log of a batch's owner, over a store that is asked at an awkward moment."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from millrace.bus.memory import MemoryBroker, MemoryBus
from millrace.gateway.batches.log import BatchLog
from millrace.gateway.batches.store import BatchStore, FinishedLine, LogEntry


class _Store:
    """Notes another line in the turn of the loop in which its first entry ends."""

    def __init__(self) -> None:
        self.entries: list[LogEntry] = []
        self.log: BatchLog
        self.other: asyncio.Task[None]

    async def append(self, _batch_id: str, entry: LogEntry, _last_sequence: int) -> int:
        self.entries.append(entry)
        if len(self.entries) == 1:
            self.other = asyncio.create_task(self._note_and_flush())
        return len(self.entries)

    async def _note_and_flush(self) -> None:
        self.log.note_finished(FinishedLine(1, True, b"second"))
        await self.log.flush()


@pytest.mark.timeout(20)
async def test_a_line_finished_during_a_write_is_written_next() -> None:
    store = _Store()
    store.log = BatchLog(cast(BatchStore, store), MemoryBus(MemoryBroker()).objects, "batch")
    store.log.note_finished(FinishedLine(0, True, b"first"))
    await store.log.flush()
    await store.other
    written = [line.answer for entry in store.entries for line in entry.finished]
    assert written == [b"first", b"second"]
