"""Progress of a batch, kept by its owner in memory and written to the log soon after."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec

from millrace.bus.store.objects import Objects
from millrace.gateway.batches.input import InputLine
from millrace.gateway.batches.store import BatchStore, FinishedLine, LogEntry, PublishedLine
from millrace.runtime.json.lines import on_one_line
from millrace.schemas.batches.batches import BatchAnswer, BatchLine, LineError, LineResponse

_ENTRY_BYTES = 256 * 1024
_LINE_OVERHEAD_BYTES = 64


def answer_line(
    batch_id: str, line: InputLine, request: BatchLine, answer: LineResponse | LineError
) -> bytes:
    """Format a line of the output or error file: the endpoint's answer, or the reason why the
    request was not run.
    """
    return on_one_line(
        msgspec.json.encode(
            BatchAnswer(
                id=f"batch_req_{batch_id.removeprefix('batch_')}_{line.number}",
                custom_id=request.custom_id,
                response=answer if isinstance(answer, LineResponse) else None,
                error=answer if isinstance(answer, LineError) else None,
            )
        )
    )


class BatchLog:
    """Log of a batch, written by its owner.

    Invariants: a line is finished at most once across all owners; entries survive this process once
    ``flush`` returned. A superseded owner gets JournalConflictError from ``flush`` and must stop:
    its later entries are void.
    """

    def __init__(self, store: BatchStore, objects: Objects, batch_id: str) -> None:
        self._store = store
        self._objects = objects
        self._batch_id = batch_id
        self._last_sequence = 0
        self._published: list[PublishedLine] = []
        self._finished: list[FinishedLine] = []
        self._writing: asyncio.Task[None] | None = None
        self.finished: set[int] = set()
        self.in_queue: dict[int, PublishedLine] = {}
        self.num_completed = 0
        self.num_failed = 0

    async def load(self) -> None:
        """Read the entries of previous owners."""
        async for sequence, entry in self._store.log(self._batch_id):
            self._last_sequence = sequence
            for published in entry.published:
                self.in_queue[published.line] = published
            for finished in entry.finished:
                self._count(finished)

    def note_published(self, published: PublishedLine) -> None:
        self.in_queue[published.line] = published
        self._published.append(published)

    def note_finished(self, finished: FinishedLine) -> None:
        if finished.line in self.finished:
            return
        self._count(finished)
        self._finished.append(finished)

    def note_answer(
        self, line: InputLine, request: BatchLine, answer: LineResponse | LineError, *, ok: bool
    ) -> None:
        """Note the answer of a line's request."""
        told = answer_line(self._batch_id, line, request, answer)
        self.note_finished(FinishedLine(line.number, ok, told))

    async def flush(self) -> None:
        """Write the noted entries. Raises JournalConflictError, or BusUnavailableError, after which
        the caller may retry.
        """
        while self._published or self._finished:
            # A write that has just ended needs no wait, which saves a turn of the event loop.
            if self._writing is None or self._writing.done():
                # Keep track of a write in progress even if no caller waits for it.
                self._writing = asyncio.create_task(self._write())
                self._writing.add_done_callback(_written)
            await asyncio.shield(self._writing)

    async def _write(self) -> None:
        published, finished = self._published[:], await self._next_finished()
        entry = LogEntry(tuple(published), tuple(finished))
        self._last_sequence = await self._store.append(self._batch_id, entry, self._last_sequence)
        del self._published[: len(published)]
        del self._finished[: len(finished)]

    async def _next_finished(self) -> list[FinishedLine]:
        """Return as many finished lines as fit into an entry. A line that exceeds an entry by
        itself is stored apart.
        """
        taken: list[FinishedLine] = []
        num_bytes = 0
        for line in list(self._finished):
            size_bytes = len(line.answer) + _LINE_OVERHEAD_BYTES
            if size_bytes > _ENTRY_BYTES:
                await self._objects.put(
                    self._batch_id, str(line.line), _one(line.answer), metadata={}
                )
                line, size_bytes = FinishedLine(line.line, line.ok, b""), _LINE_OVERHEAD_BYTES
            num_bytes += size_bytes
            if taken and num_bytes > _ENTRY_BYTES:
                break
            taken.append(line)
        return taken

    async def answers(self, *, ok: bool) -> AsyncIterator[bytes]:
        """Yield the lines of the output file, or of the error file, from the log."""
        async for _, entry in self._store.log(self._batch_id):
            for finished in entry.finished:
                if finished.ok is not ok:
                    continue
                if finished.answer:
                    yield finished.answer + b"\n"
                    continue
                stored = await self._objects.info(self._batch_id, str(finished.line))
                assert stored is not None, "the object is stored before the entry"
                async for chunk in self._objects.read(stored):
                    yield chunk
                yield b"\n"

    async def forget(self) -> None:
        """Delete the lines stored apart, once the output files exist."""
        for name in await self._objects.names(self._batch_id):
            await self._objects.delete(self._batch_id, name)

    def _count(self, finished: FinishedLine) -> None:
        self.finished.add(finished.line)
        self.in_queue.pop(finished.line, None)
        if finished.ok:
            self.num_completed += 1
        else:
            self.num_failed += 1


def _written(writing: asyncio.Task[None]) -> None:
    if not writing.cancelled():
        writing.exception()  # a waiting caller has seen it; otherwise the next entry will


async def _one(answer: bytes) -> AsyncIterator[bytes]:
    yield answer
