"""Results, outbox and worker entries in memory."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import NamedTuple

from bus import subjects
from bus.fleet.directory import ENTRY_TTL_S
from runtime.clock import Clock
from runtime.tasks import wait_or_sleep

BRIDGE_ACK_WAIT_S = 30.0


class StoredResults:
    """First result by subject, for a while."""

    def __init__(self, clock: Clock, ttl_s: float) -> None:
        self._clock = clock
        self._ttl_s = ttl_s
        self._entries: dict[str, tuple[bytes, float]] = {}

    def add(self, subject: str, payload: bytes) -> None:
        if self.get(subject) is None:
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


class Entries:
    """Last value by subject, each for ``ENTRY_TTL_S``; revisions count all that were put."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._last_revision = 0

    def put(self, subject: str, payload: bytes) -> int:
        self._last_revision += 1
        until_s = self._clock.monotonic() + ENTRY_TTL_S
        self._entries[subject] = _Entry(payload, self._last_revision, until_s)
        return self._last_revision

    def put_after(self, subject: str, payload: bytes, after: int) -> int | None:
        known = self.get(subject)
        if after != (0 if known is None else known[1]):
            return None
        return self.put(subject, payload)

    def get(self, subject: str) -> tuple[bytes, int] | None:
        entry = self._entries.get(subject)
        if entry is None or entry.until_s <= self._clock.monotonic():
            return None
        return entry.payload, entry.revision

    def all(self) -> list[bytes]:
        """The workers', not those on names."""
        return [payload for payload, _ in self.ages()]

    def ages(self) -> list[tuple[bytes, float]]:
        """The workers', each with how long ago it was put, in seconds."""
        now_s, place = self._clock.monotonic(), subjects.ALL_WORKERS.count(".")
        return [
            (entry.payload, now_s - entry.until_s + ENTRY_TTL_S)
            for subject, entry in self._entries.items()
            if entry.until_s > now_s and subject.count(".") == place
        ]


@dataclass(frozen=True)
class LoggedRecord:
    sequence: int
    subject: str
    payload: bytes
    until_s: float


class OutboxLog:
    """Records in order, and how far the bridge has come with them."""

    def __init__(self, clock: Clock, max_age_s: float) -> None:
        self._clock = clock
        self._max_age_s = max_age_s
        self._records: list[LoggedRecord] = []
        self._last_sequence = 0
        self._known: set[str] = set()
        self._start_after = 0
        self._acked: set[int] = set()
        self._held_until_s: dict[int, float] = {}
        self._waiters: set[asyncio.Event] = set()

    @property
    def last_sequence(self) -> int:
        return self._last_sequence

    @property
    def num_waiting(self) -> int:
        waiting = {one.sequence for one in self._records if one.sequence > self._start_after}
        return len(waiting - self._acked)

    def add(self, subject: str, payload: bytes, identity: str) -> None:
        if identity in self._known:
            return
        self._known.add(identity)
        self._last_sequence += 1
        until_s = self._clock.monotonic() + self._max_age_s
        self._records.append(LoggedRecord(self._last_sequence, subject, payload, until_s))
        self.wake()

    def take(self, max_records: int) -> list[LoggedRecord]:
        now_s = self._clock.monotonic()
        self._records = [record for record in self._records if record.until_s > now_s]
        taken = [
            record
            for record in self._records
            if record.sequence > self._start_after
            and record.sequence not in self._acked
            and self._held_until_s.get(record.sequence, 0.0) <= now_s
        ][:max_records]
        for record in taken:
            self._held_until_s[record.sequence] = now_s + BRIDGE_ACK_WAIT_S
        return taken

    def ack(self, sequence: int) -> None:
        self._acked.add(sequence)

    def rewind(self, sequence: int) -> None:
        self._start_after = sequence if sequence <= self._last_sequence else 0
        self._acked.clear()
        self._held_until_s.clear()
        self.wake()

    async def wait(self, timeout_s: float) -> None:
        """Return after a change, or after ``timeout_s``."""
        event = asyncio.Event()
        self._waiters.add(event)
        await wait_or_sleep(event, self._clock, timeout_s)
        self._waiters.discard(event)

    def wake(self) -> None:
        for event in self._waiters:
            event.set()
