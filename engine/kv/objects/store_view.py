"""State of an object store as one engine has observed it."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable

from millrace.engine.kv.objects.block_objects import BlockObjects

_log = logging.getLogger(__name__)

# Pause after a failure. It doubles with each failure that follows, up to a minute.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_MAX_KNOWN = 1 << 16
# Time after which another worker may have written an absent object.
_ABSENT_S = 10.0
# Latency, bandwidth and hit rate assumed before the first measurement, and weight of the latest
# measurement in the EWMAs.
_ASSUMED_WAIT_S, _ASSUMED_BYTES_PER_S, _ASSUMED_FOUND = 0.03, 1e9, 0.5
_NEWEST_WEIGHT = 0.2
# Lower bound of the hit rate, so that long prompts still look in the store.
_LEAST_FOUND = 0.1


class Circuit:
    """Circuit breaker of a store: it is not used for a while after a failure.

    Requests that were in flight then fail for the same reason, and do not prolong the pause. Notes
    are for one thread; ``is_open`` is for any.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._until_s = 0.0
        self._pause_s = _FIRST_PAUSE_S

    @property
    def is_open(self) -> bool:
        """True while the store is not used."""
        return self._monotonic() < self._until_s

    def note_failure(self, why: str) -> None:
        if self.is_open:
            return
        _log.warning(
            "the KV cache's object store failed; no requests for %g s: %s", self._pause_s, why
        )
        self._until_s = self._monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def note_success(self) -> None:
        self._until_s = 0.0
        self._pause_s = _FIRST_PAUSE_S


class KnownObjects:
    """Runs that the store had, or did not have a moment ago, by the key of their last block."""

    def __init__(self, monotonic: Callable[[], float], max_known: int = _MAX_KNOWN) -> None:
        self._monotonic = monotonic
        self._max_known = max_known
        self._present: OrderedDict[bytes, None] = OrderedDict()
        self._absent: OrderedDict[bytes, float] = OrderedDict()  # until when, the earliest first
        self._damaged: set[bytes] = set()

    def is_present(self, last_key: bytes) -> bool:
        """Return whether the store had the run when it was last used here."""
        return last_key in self._present

    def is_absent(self, last_key: bytes) -> bool:
        """Return whether it is too early to look again."""
        until_s = self._absent.get(last_key)
        return until_s is not None and self._monotonic() < until_s

    def is_damaged(self, last_key: bytes) -> bool:
        """Return whether the object is damaged and has to be overwritten."""
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
        """Note that an object has other contents: it counts as absent until it is written again."""
        self.note_absent(last_key)
        if len(self._damaged) < self._max_known:
            self._damaged.add(last_key)


class StoreSpeed:
    """Speed of a store as EWMAs: its latency, its bandwidth, and the hit rate of reads."""

    def __init__(self) -> None:
        self.wait_s = _ASSUMED_WAIT_S
        self.bytes_per_s = _ASSUMED_BYTES_PER_S
        self._is_measured = False
        self._found = _ASSUMED_FOUND

    def brings_s(self, num_bytes: int) -> float:
        """Predict the seconds to read ``num_bytes``.

        The latency is divided by the hit rate, to count reads that find nothing. So looking pays
        where this is less than computing.
        """
        return self.wait_s / max(self._found, _LEAST_FOUND) + num_bytes / self.bytes_per_s

    def note_answer(self, wait_s: float) -> None:
        """Note the latency of a request that returned no blocks."""
        self.wait_s += _NEWEST_WEIGHT * (wait_s - self.wait_s)

    def note_bytes(self, num_bytes: int, read_s: float) -> None:
        measured = num_bytes / max(read_s - self.wait_s, read_s / 2, 1e-9)
        weight = _NEWEST_WEIGHT if self._is_measured else 1.0
        self.bytes_per_s += weight * (measured - self.bytes_per_s)
        self._is_measured = True

    def note_look(self, *, found: bool) -> None:
        self._found += _NEWEST_WEIGHT * (found - self._found)


class StoreView:
    """View of a store's objects for prefixes of at least ``min_tokens``: known objects, circuit
    breaker and speed."""

    def __init__(
        self, objects: BlockObjects, min_tokens: int, monotonic: Callable[[], float]
    ) -> None:
        self.objects = objects
        self.min_tokens = min_tokens
        self.known = KnownObjects(monotonic)
        self.circuit = Circuit(monotonic)
        self.speed = StoreSpeed()
