"""What files and batches are made of: entries in order under names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from millrace.schemas.errors import MillraceError


class JournalConflictError(MillraceError, code="conflict", retryable=True, http_status=409):
    """Somebody else wrote under that name in the meantime; nothing was stored."""

    def __init__(self) -> None:
        super().__init__("Somebody else changed it at the same time. Try again.")


class JournalEntry(msgspec.Struct, frozen=True, kw_only=True):
    """An entry and its place; sequences of one name only grow."""

    sequence: int
    payload: bytes


class Journal(Protocol):
    """Entries in order under names, kept for ``nats.files_ttl_s``: what files and batches are
    made of. Names are those of ``bus.subjects``, section "files and batches".

    Every method raises BusUnavailableError while nobody can say.
    """

    async def append(self, name: str, payload: bytes, *, after: int, replace: bool = False) -> int:
        """Store an entry behind the one with the sequence ``after``, which must be the name's last
        (0: it must have none); with ``replace`` those before it go. Returns its sequence.

        Raises JournalConflictError if another entry is the last one, and PayloadTooLargeError:
        nothing was stored.
        """

    async def next(self, name: str, after: int) -> JournalEntry | None:
        """The first entry behind a sequence."""

    async def last(self, name: str) -> JournalEntry | None:
        """The newest entry, never an older one."""

    async def last_of(self, names: Sequence[str]) -> dict[str, JournalEntry]:
        """The newest entries of those names that have any."""

    async def names(self, pattern: str) -> list[str]:
        """The names with entries that match a pattern, sorted."""

    async def drop(self, name: str) -> None:
        """Remove every entry of a name."""
