"""Blocks that entered and left the prefix cache, for schedulers that place requests by them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from millrace.engine.types import PrefixChanges
from millrace.schemas.prefix import REPORTED_BYTES

MAX_NOTED_KEYS = 1 << 16


class KvEvents:
    """Keys that changed since ``pop``; O(1) a key, which is all a step pays.

    ``is_kept`` says whether a key is found now, ``kept`` lists those that are, the longest unused
    first. Where more than ``max_noted`` keys gather, what is kept is told as a whole.
    """

    def __init__(
        self,
        is_kept: Callable[[bytes], bool],
        kept: Callable[[], Iterable[bytes]],
        *,
        max_noted: int = MAX_NOTED_KEYS,
    ) -> None:
        self._is_kept = is_kept
        self._kept = kept
        self._max_noted = max_noted
        self._noted: dict[bytes, None] = {}
        self._overflowed = False

    def record(self, key: bytes) -> None:
        """A key was inserted, evicted or used."""
        noted = self._noted
        noted.pop(key, None)
        noted[key] = None
        if len(noted) > self._max_noted:
            noted.clear()
            self._overflowed = True

    def pop(self) -> PrefixChanges | None:
        """What changed since the last call; None if nothing did."""
        if self._overflowed:
            self._overflowed = False
            self._noted.clear()
            keys = list(self._kept())[-self._max_noted :]
            return PrefixChanges(added=_reported(keys), whole=True)
        if not self._noted:
            return None
        noted, self._noted = self._noted, {}
        is_kept = self._is_kept
        added = [key for key in noted if is_kept(key)]
        removed = [key for key in noted if not is_kept(key)] if len(added) < len(noted) else []
        return PrefixChanges(added=_reported(added), removed=_reported(removed))


def _reported(keys: list[bytes]) -> bytes:
    return b"".join([key[:REPORTED_BYTES] for key in keys])
