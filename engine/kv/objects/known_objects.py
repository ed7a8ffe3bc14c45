"""What this engine has lately seen of a store that others write to as well."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

_MAX_KNOWN = 1 << 16
# Others may have written it by then.
_ABSENT_S = 10.0


class KnownObjects:
    """Runs, by the key of their last block, that were there, and that were not a moment ago."""

    def __init__(self, monotonic: Callable[[], float], max_known: int = _MAX_KNOWN) -> None:
        self._monotonic = monotonic
        self._max_known = max_known
        self._present: OrderedDict[bytes, None] = OrderedDict()
        self._absent: OrderedDict[bytes, float] = OrderedDict()  # until when, the earliest first
        self._damaged: set[bytes] = set()

    def is_present(self, last_key: bytes) -> bool:
        """Whether it was there when it was last used here."""
        return last_key in self._present

    def is_absent(self, last_key: bytes) -> bool:
        """Whether looking again is too early."""
        until_s = self._absent.get(last_key)
        return until_s is not None and self._monotonic() < until_s

    def is_damaged(self, last_key: bytes) -> bool:
        """Whether what is there is to be overwritten."""
        return last_key in self._damaged

    def note_present(self, last_key: bytes) -> None:
        self._absent.pop(last_key, None)
        self._damaged.discard(last_key)
        self._present[last_key] = None
        self._present.move_to_end(last_key)
        if len(self._present) > self._max_known:
            self._present.popitem(last=False)

    def note_absent(self, last_key: bytes) -> None:
        self._present.pop(last_key, None)
        self._absent.pop(last_key, None)
        self._absent[last_key] = self._monotonic() + _ABSENT_S
        if len(self._absent) > self._max_known:
            self._absent.popitem(last=False)

    def note_damaged(self, last_key: bytes) -> None:
        """It is not what was written: absent until it is written anew."""
        self.note_absent(last_key)
        if len(self._damaged) < self._max_known:
            self._damaged.add(last_key)
