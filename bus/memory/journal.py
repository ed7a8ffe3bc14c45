"""Journal in memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from bus.api import JournalEntry
from bus.store.journal import JournalConflictError
from runtime.clock import Clock


@dataclass(frozen=True)
class _Kept:
    entry: JournalEntry
    until_s: float


class StoredJournal:
    """Entries by name, each for a while; what all clients share."""

    def __init__(self, clock: Clock, ttl_s: float) -> None:
        self._clock = clock
        self._ttl_s = ttl_s
        self._names: dict[str, list[_Kept]] = {}
        self._sequences = itertools.count(1)

    def entries(self, name: str) -> list[JournalEntry]:
        now_s = self._clock.monotonic()
        return [kept.entry for kept in self._names.get(name, ()) if kept.until_s > now_s]

    def append(self, name: str, payload: bytes, *, replace: bool) -> int:
        entry = JournalEntry(sequence=next(self._sequences), payload=payload)
        kept = _Kept(entry, self._clock.monotonic() + self._ttl_s)
        self._names[name] = [kept] if replace else [*self._names.get(name, ()), kept]
        return entry.sequence

    def drop(self, name: str) -> None:
        self._names.pop(name, None)

    def all_names(self) -> list[str]:
        return sorted(name for name in self._names if self.entries(name))


class _Broker(Protocol):
    journal: StoredJournal

    def require_up(self) -> None: ...

    def require_fits(self, size_bytes: int) -> None: ...


class MemoryJournal:
    """See ``bus.api.Journal``."""

    def __init__(self, broker: _Broker) -> None:
        self._broker = broker

    async def append(self, name: str, payload: bytes, *, after: int, replace: bool = False) -> int:
        self._broker.require_fits(len(payload))
        entries = self._entries(name)
        if (entries[-1].sequence if entries else 0) != after:
            raise JournalConflictError
        return self._broker.journal.append(name, payload, replace=replace)

    async def next(self, name: str, after: int) -> JournalEntry | None:
        return next((entry for entry in self._entries(name) if entry.sequence > after), None)

    async def last(self, name: str) -> JournalEntry | None:
        entries = self._entries(name)
        return entries[-1] if entries else None

    async def last_of(self, names: Sequence[str]) -> dict[str, JournalEntry]:
        found = {name: self._entries(name) for name in names}
        return {name: entries[-1] for name, entries in found.items() if entries}

    async def names(self, pattern: str) -> list[str]:
        self._broker.require_up()
        return [name for name in self._broker.journal.all_names() if _matches(pattern, name)]

    async def drop(self, name: str) -> None:
        self._broker.require_up()
        self._broker.journal.drop(name)

    def _entries(self, name: str) -> list[JournalEntry]:
        self._broker.require_up()
        return self._broker.journal.entries(name)


def _matches(pattern: str, name: str) -> bool:
    wanted, parts = pattern.split("."), name.split(".")
    return len(wanted) == len(parts) and all(
        one in ("*", part) for one, part in zip(wanted, parts, strict=True)
    )
