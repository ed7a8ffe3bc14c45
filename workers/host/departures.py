"""Streams that have left a worker and whose KV blocks may still be pulled."""

from __future__ import annotations

from collections.abc import Iterable

from millrace.runtime.clock import Clock

# Maximum time that an ending worker stays for a stream that has left.
_KEPT_S = 2.0


class Departures:
    """Streams that have left this worker; each counts until its new worker needs no more, for
    ``_KEPT_S`` at most.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until_s: dict[str, float] = {}  # earliest first

    def add(self, request_id: str) -> None:
        """Record that a stream has just left."""
        self._forget_late()
        self._until_s.pop(request_id, None)
        self._until_s[request_id] = self._clock.monotonic() + _KEPT_S

    def discard(self, request_ids: Iterable[str]) -> None:
        """Forget streams whose new workers need nothing more."""
        for request_id in request_ids:
            self._until_s.pop(request_id, None)

    def __len__(self) -> int:
        self._forget_late()
        return len(self._until_s)

    def _forget_late(self) -> None:
        now_s = self._clock.monotonic()
        while self._until_s:
            first = next(iter(self._until_s))
            if self._until_s[first] > now_s:
                return
            del self._until_s[first]
