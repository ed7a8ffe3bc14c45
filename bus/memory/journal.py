"""Journal in memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from millrace.bus.memory.server import MemoryServer
from millrace.bus.store.journal import JournalConflictError, JournalEntry


@dataclass(frozen=True)
class _Kept:
    entry: JournalEntry
    until_s: float


class MemoryJournal:
    """See ``bus.store.journal.Journal``; all clients share it."""

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
