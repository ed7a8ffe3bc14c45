"""An object store as one engine knows it."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable

from millrace.engine.kv.objects.block_objects import BlockObjects

_log = logging.getLogger(__name__)

# After a failure, and twice as long after each that follows it.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_MAX_KNOWN = 1 << 16
# Others may have written it by then.
_ABSENT_S = 10.0
# What a store is taken to be like before something was measured, and what a later measurement
# counts.
_ASSUMED_WAIT_S, _ASSUMED_BYTES_PER_S, _ASSUMED_FOUND = 0.03, 1e9, 0.5
_NEWEST_WEIGHT = 0.2
# Where next to nothing was found lately, long prompts are still worth a look.
_LEAST_FOUND = 0.1


class Circuit:
    """Whether a store is to be asked: not for a while after it failed. What was under way meanwhile
    fails for the same reason, and makes the pause no longer. Notes are for one thread;
    ``is_open`` is for any."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._until_s = 0.0
        self._pause_s = _FIRST_PAUSE_S

    @property
    def is_open(self) -> bool:
        """Whether it is left alone now."""
        return self._monotonic() < self._until_s

    def note_failure(self, why: str) -> None:
        if self.is_open:
            return
        _log.warning(
            "the object store of the KV cache is left alone for %g s: %s", self._pause_s, why
        )
        self._until_s = self._monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def note_success(self) -> None:
        self._until_s = 0.0
        self._pause_s = _FIRST_PAUSE_S


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


class StoreSpeed:
    """How long a store takes to answer, how fast blocks come then, and which share of the looks
    found some."""

    def __init__(self) -> None:
        self.wait_s = _ASSUMED_WAIT_S
        self.bytes_per_s = _ASSUMED_BYTES_PER_S
        self._is_measured = False
        self._found = _ASSUMED_FOUND

    def brings_s(self, num_bytes: int) -> float:
        """What so many bytes are predicted to take. That a look may be in vain counts as waiting
        once more for each that is, so that looking pays where this is less than computing."""
        return self.wait_s / max(self._found, _LEAST_FOUND) + num_bytes / self.bytes_per_s

    def note_answer(self, wait_s: float) -> None:
        """A request that brought nothing took so long."""
        self.wait_s += _NEWEST_WEIGHT * (wait_s - self.wait_s)

    def note_bytes(self, num_bytes: int, read_s: float) -> None:
        measured = num_bytes / max(read_s - self.wait_s, read_s / 2, 1e-9)
        weight = _NEWEST_WEIGHT if self._is_measured else 1.0
        self.bytes_per_s += weight * (measured - self.bytes_per_s)
        self._is_measured = True

    def note_look(self, *, found: bool) -> None:
        self._found += _NEWEST_WEIGHT * (found - self._found)


class StoreView:
    """The objects of an engine's blocks, those of prefixes of at least ``min_tokens``: which were
    there lately, how fast they come, and whether the store is to be asked now."""

    def __init__(
        self, objects: BlockObjects, min_tokens: int, monotonic: Callable[[], float]
    ) -> None:
        self.objects = objects
        self.min_tokens = min_tokens
        self.known = KnownObjects(monotonic)
        self.circuit = Circuit(monotonic)
        self.speed = StoreSpeed()
