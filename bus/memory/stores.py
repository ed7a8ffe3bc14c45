"""Results, outbox, journal and worker entries in memory."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from millrace.bus import codec, subjects
from millrace.bus.api import OutboxMessage
from millrace.bus.fleet.directory import ENTRY_TTL_S
from millrace.bus.store.objects import JournalConflictError, JournalEntry
from millrace.runtime.clock import Clock
from millrace.runtime.tasks import wait_or_sleep
from millrace.schemas.config import NatsConfig
from millrace.schemas.errors import BusUnavailableError, PayloadTooLargeError
from millrace.schemas.records import Record

BRIDGE_ACK_WAIT_S = 30.0


class MemoryServer:
    """State of a server that its stores share.

    ``failed_streams`` accept nothing, each with its cause. ``num_starts`` counts the starts.
    """

    def __init__(self, clock: Clock, config: NatsConfig, max_payload_bytes: int) -> None:
        self.clock = clock
        self.config = config
        self.max_payload_bytes = max_payload_bytes
        self.up = True
        self.num_starts = 1
        self.failed_streams: dict[str, str] = {}

    def require_up(self) -> None:
        """Raise BusUnavailableError while the server is stopped."""
        if not self.up:
            raise BusUnavailableError("The message bus cannot be reached. Try again later.")

    def require_store(self, stream: str) -> None:
        """Raise BusUnavailableError while the server is stopped or the stream has failed."""
        self.require_up()
        if stream in self.failed_streams:
            raise BusUnavailableError("The message bus cannot be reached: no answer in time.")

    def require_fits(self, size_bytes: int) -> None:
        """Raise PayloadTooLargeError for a message that is too large."""
        if size_bytes > self.max_payload_bytes:
            raise PayloadTooLargeError(size_bytes, self.max_payload_bytes)


class StoredResults:
    """Results by subject, each until it expires."""

    def __init__(self, clock: Clock, ttl_s: float) -> None:
        self._clock = clock
        self._ttl_s = ttl_s
        self._entries: dict[str, tuple[bytes, float]] = {}

    def put(self, subject: str, payload: bytes) -> None:
        self._entries[subject] = (payload, self._clock.monotonic() + self._ttl_s)

    def get(self, subject: str) -> bytes | None:
        entry = self._entries.get(subject)
        if entry is None or entry[1] <= self._clock.monotonic():
            return None
        return entry[0]


class _Entry(NamedTuple):
    payload: bytes
    revision: int
    until_s: float


class MemoryBucket:
    """Worker bucket in memory.

    See ``bus.fleet.directory.WorkerBucket``. Revisions count all puts.
    """

    def __init__(self, server: MemoryServer) -> None:
        self._server = server
        self._entries: dict[str, _Entry] = {}
        self._last_revision = 0

    async def put(self, subject: str, payload: bytes) -> None:
        if self._server.up:
            self._put(subject, payload)

    def _put(self, subject: str, payload: bytes) -> int:
        self._last_revision += 1
        until_s = self._server.clock.monotonic() + ENTRY_TTL_S
        self._entries[subject] = _Entry(payload, self._last_revision, until_s)
        return self._last_revision

    async def put_after(self, subject: str, payload: bytes, after: int) -> int | None:
        known = await self.get(subject)
        if after != (0 if known is None else known[1]):
            return None
        return self._put(subject, payload)

    async def get(self, subject: str) -> tuple[bytes, int] | None:
        self._server.require_up()
        entry = self._entries.get(subject)
        if entry is None or entry.until_s <= self._server.clock.monotonic():
            return None
        return entry.payload, entry.revision

    async def entries(self) -> Sequence[bytes]:
        return [payload for payload, _ in await self.ages()]

    async def ages(self) -> Sequence[tuple[bytes, float]]:
        self._server.require_up()
        now_s, place = self._server.clock.monotonic(), subjects.ALL_WORKERS.count(".")
        return [
            (entry.payload, now_s - entry.until_s + ENTRY_TTL_S)
            for subject, entry in self._entries.items()
            if entry.until_s > now_s and subject.count(".") == place
        ]


@dataclass(frozen=True)
class _Logged:
    message: OutboxMessage
    until_s: float


class MemoryOutbox:
    """Outbox in memory with the bridge's position. See ``bus.api.Outbox``."""

    def __init__(self, server: MemoryServer) -> None:
        self._server = server
        self._records: list[_Logged] = []
        self._last_sequence = 0
        self._known: set[str] = set()
        self._start_after = 0
        self._acked: set[int] = set()
        self._held_until_s: dict[int, float] = {}
        self._waiters: set[asyncio.Event] = set()

    async def publish(self, record: Record, linger_s: float = 0.0) -> None:
        del linger_s  # a batch saves nothing here
        payload = codec.encode(record)
        self._server.require_fits(len(payload))
        self._server.require_store(subjects.OUTBOX_STREAM)
        self.add(subjects.record(record), payload, subjects.record_identity(record))

    def add(self, subject: str, payload: bytes, identity: str) -> None:
        """Store a message unchanged, once by its identity."""
        if identity in self._known:
            return
        self._known.add(identity)
        self._last_sequence += 1
        message = OutboxMessage(
            sequence=self._last_sequence,
            subject=subject,
            payload=payload,
            lease=str(self._last_sequence),
        )
        until_s = self._server.clock.monotonic() + self._server.config.outbox_max_age_s
        self._records.append(_Logged(message, until_s))
        self.wake()

    async def pull(self, max_records: int, timeout_s: float) -> list[OutboxMessage]:
        clock = self._server.clock
        deadline_s = clock.monotonic() + timeout_s
        while True:
            taken = self._take(max_records) if self._server.up else []
            left_s = deadline_s - clock.monotonic()
            if taken or left_s <= 0:
                return taken
            event = asyncio.Event()
            self._waiters.add(event)
            await wait_or_sleep(event, clock, left_s)
            self._waiters.discard(event)

    def _take(self, max_records: int) -> list[OutboxMessage]:
        now_s = self._server.clock.monotonic()
        self._records = [record for record in self._records if record.until_s > now_s]
        taken = [
            message
            for message in self.messages()
            if message.sequence > self._start_after
            and message.sequence not in self._acked
            and self._held_until_s.get(message.sequence, 0.0) <= now_s
        ][:max_records]
        for message in taken:
            self._held_until_s[message.sequence] = now_s + BRIDGE_ACK_WAIT_S
        return taken

    async def ack(self, messages: Sequence[OutboxMessage]) -> None:
        self._server.require_up()
        self._acked.update(message.sequence for message in messages)

    async def rewind(self, sequence: int) -> None:
        self._server.require_up()
        self._start_after = sequence if sequence <= self._last_sequence else 0
        self._acked.clear()
        self._held_until_s.clear()
        self.wake()

    async def last_sequence(self) -> int:
        self._server.require_up()
        return self._last_sequence

    async def num_waiting(self) -> int:
        self._server.require_up()
        waiting = {one.sequence for one in self.messages() if one.sequence > self._start_after}
        return len(waiting - self._acked)

    def messages(self) -> list[OutboxMessage]:
        """Return all kept messages in order."""
        return [record.message for record in self._records]

    def wake(self) -> None:
        """Wake the waiting pulls."""
        for event in self._waiters:
            event.set()


@dataclass(frozen=True)
class _Kept:
    entry: JournalEntry
    until_s: float


class MemoryJournal:
    """Journal in memory, shared by all clients. See ``bus.store.journal.Journal``."""

    def __init__(self, server: MemoryServer) -> None:
        self._server = server
        self._names: dict[str, list[_Kept]] = {}
        self._sequences = itertools.count(1)

    async def append(self, name: str, payload: bytes, *, after: int, replace: bool = False) -> int:
        self._server.require_fits(len(payload))
        entries = self._entries(name)
        if (entries[-1].sequence if entries else 0) != after:
            raise JournalConflictError
        entry = JournalEntry(sequence=next(self._sequences), payload=payload)
        until_s = self._server.clock.monotonic() + self._server.config.files_ttl_s
        before = [] if replace else self._names.get(name, [])
        self._names[name] = [*before, _Kept(entry, until_s)]
        return entry.sequence

    async def next(self, name: str, after: int) -> JournalEntry | None:
        return next((entry for entry in self._entries(name) if entry.sequence > after), None)

    async def last(self, name: str) -> JournalEntry | None:
        entries = self._entries(name)
        return entries[-1] if entries else None

    async def last_of(self, names: Sequence[str]) -> dict[str, JournalEntry]:
        found = {name: self._entries(name) for name in names}
        return {name: entries[-1] for name, entries in found.items() if entries}

    async def names(self, pattern: str) -> list[str]:
        self._server.require_up()
        matching = (name for name in self._names if _matches(pattern, name))
        return sorted(name for name in matching if self._entries(name))

    async def drop(self, name: str) -> None:
        self._server.require_up()
        self._names.pop(name, None)

    def _entries(self, name: str) -> list[JournalEntry]:
        self._server.require_up()
        now_s = self._server.clock.monotonic()
        return [kept.entry for kept in self._names.get(name, ()) if kept.until_s > now_s]


def _matches(pattern: str, name: str) -> bool:
    wanted, parts = pattern.split("."), name.split(".")
    return len(wanted) == len(parts) and all(
        one in ("*", part) for one, part in zip(wanted, parts, strict=True)
    )
