"""Large objects, stored as chunks in the journal."""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from typing import Protocol

import msgspec

from millrace.bus import codec, subjects
from millrace.runtime.clock import Clock
from millrace.schemas.errors import BusUnavailableError, MillraceError

logger = logging.getLogger(__name__)


class JournalConflictError(MillraceError, code="conflict", retryable=True, http_status=409):
    """Another process wrote under that name in the meantime. Nothing was stored."""

    def __init__(self) -> None:
        super().__init__("It was changed at the same time. Try again.")


class JournalEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Journal entry with its place; sequences of one name only grow."""

    sequence: int
    payload: bytes


class Journal(Protocol):
    """Ordered entries under names, kept for ``nats.files_ttl_s``: the storage of files and batches.

    Names are those of ``bus.subjects``, section "files and batches". Every method raises
    BusUnavailableError.
    """

    async def append(self, name: str, payload: bytes, *, after: int, replace: bool = False) -> int:
        """Store an entry behind the one with the sequence ``after``; return its sequence.

        ``after`` must be the name's last entry (0: it must have none). ``replace`` removes the
        entries before it. Raises JournalConflictError if another entry is the last one, and
        PayloadTooLargeError: nothing was stored.
        """

    async def next(self, name: str, after: int) -> JournalEntry | None:
        """Return the first entry behind a sequence."""

    async def last(self, name: str) -> JournalEntry | None:
        """Return the newest entry, never an older one."""

    async def last_of(self, names: Sequence[str]) -> dict[str, JournalEntry]:
        """Return the newest entries of the names that have any."""

    async def names(self, pattern: str) -> list[str]:
        """Return the names with entries that match a pattern, sorted."""

    async def drop(self, name: str) -> None:
        """Remove every entry of a name."""


_CHUNK_BYTES = 128 * 1024
_INFOS_AT_ONCE = 500


class ObjectLostError(MillraceError, code="file_lost", http_status=410):
    """Object whose bytes are partly gone."""


class StoredObject(msgspec.Struct, frozen=True, kw_only=True):
    """Immutable stored bytes. ``sha256`` is hexadecimal. ``metadata`` is the owner's own."""

    name: str
    size_bytes: int
    num_chunks: int
    sha256: str
    upload_id: str
    stored_ns: int
    metadata: dict[str, str]


class Objects:
    """Large immutable objects by owner and name, kept for ``ttl_s``.

    Chunks go under a random name for each attempt. The entry that describes the object comes last
    and at most once. So a reader that finds the entry finds all bytes. If two processes store the
    same object, one wins and the other removes its chunks.
    """

    def __init__(
        self, journal: Journal, clock: Clock, ttl_s: float, max_payload_bytes: int
    ) -> None:
        self.ttl_s = ttl_s
        self._journal = journal
        self._clock = clock
        self._chunk_bytes = min(_CHUNK_BYTES, max_payload_bytes // 2)

    async def put(
        self, owner: str, name: str, chunks: AsyncIterable[bytes], metadata: dict[str, str]
    ) -> StoredObject:
        """Store bytes as they come, in chunks that fit a message.

        An existing object of that name stays and is returned. Raises the errors of ``chunks``:
        nothing is stored then. Raises BusUnavailableError: the object may be stored all the same,
        as after a cancellation.
        """
        upload_id = secrets.token_hex(16)
        chunk_name = subjects.object_chunks(upload_id)
        digest = hashlib.sha256()
        size_bytes = num_chunks = last = 0
        is_entered = False
        try:
            async for chunk in _of_size(chunks, self._chunk_bytes):
                digest.update(chunk)
                last = await self._journal.append(chunk_name, chunk, after=last)
                size_bytes += len(chunk)
                num_chunks += 1
            stored = StoredObject(
                name=name,
                size_bytes=size_bytes,
                num_chunks=num_chunks,
                sha256=digest.hexdigest(),
                upload_id=upload_id,
                stored_ns=self._clock.now_ns(),
                metadata=metadata,
            )
            is_entered = True
            await self._journal.append(
                subjects.object_entry(owner, name), codec.encode(stored), after=0
            )
        except JournalConflictError:
            there = await self.info(owner, name)
            if there is None or there.upload_id != upload_id:
                await self._forget(chunk_name)
            if there is None:
                raise
            return there
        except BaseException:
            # An entry on its way may still be stored, and then needs its chunks.
            if num_chunks and not is_entered:
                await self._forget(chunk_name)
            raise
        return stored

    async def _forget(self, chunk_name: str) -> None:
        try:
            await self._journal.drop(chunk_name)
        except BusUnavailableError:
            logger.warning("chunks of a failed upload stay until they expire")

    async def info(self, owner: str, name: str) -> StoredObject | None:
        entry = await self._journal.last(subjects.object_entry(owner, name))
        return None if entry is None else _read(entry)

    async def infos(self, owner: str, names: Sequence[str]) -> list[StoredObject]:
        """Return the existing objects, in the order of ``names``."""
        found: list[StoredObject] = []
        for start in range(0, len(names), _INFOS_AT_ONCE):
            wanted = [
                subjects.object_entry(owner, name) for name in names[start : start + _INFOS_AT_ONCE]
            ]
            entries = await self._journal.last_of(wanted)
            found.extend(_read(entries[one]) for one in wanted if one in entries)
        return found

    async def names(self, owner: str) -> list[str]:
        """Return the names of all of an owner's objects, sorted."""
        found = await self._journal.names(subjects.object_entry(owner))
        return sorted(map(subjects.last_token, found))

    async def read(self, stored: StoredObject) -> AsyncIterator[bytes]:
        """Yield an object's bytes in chunks. Raises ObjectLostError if some are missing."""
        chunk_name = subjects.object_chunks(stored.upload_id)
        last = 0
        for _ in range(stored.num_chunks):
            entry = await self._journal.next(chunk_name, last)
            if entry is None:
                raise ObjectLostError(f"The file {stored.name} was deleted or has expired.")
            last = entry.sequence
            yield entry.payload

    async def delete(self, owner: str, name: str) -> bool:
        """Delete an object; return whether it existed."""
        stored = await self.info(owner, name)
        if stored is None:
            return False
        await self._journal.drop(subjects.object_entry(owner, name))
        await self._journal.drop(subjects.object_chunks(stored.upload_id))
        return True


async def _of_size(chunks: AsyncIterable[bytes], size_bytes: int) -> AsyncIterator[bytes]:
    """Yield the same bytes in chunks of one size; the last may be shorter."""
    held = bytearray()
    async for chunk in chunks:
        held += chunk
        start = 0
        while len(held) - start >= size_bytes:
            yield bytes(held[start : start + size_bytes])
            start += size_bytes
        del held[:start]
    if held:
        yield bytes(held)


def _read(entry: JournalEntry) -> StoredObject:
    return msgspec.msgpack.decode(entry.payload, type=StoredObject)
