"""Cancelled requests, remembered for a while: the cancel may come before the job does."""

from __future__ import annotations

from collections import OrderedDict

from millrace.schemas.control import CancelReason

_MAX_REMEMBERED = 100_000


class CancelMemory:
    """The last cancels, each for ``memory_s``. Pure: the caller passes the time in."""

    def __init__(self, memory_s: float, max_remembered: int = _MAX_REMEMBERED) -> None:
        self._memory_s = memory_s
        self._max_remembered = max_remembered
        self._cancels: OrderedDict[str, tuple[CancelReason, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._cancels)

    def add(self, request_id: str, reason: CancelReason, now_s: float) -> None:
        """The first reason stays; the time starts anew."""
        known = self._cancels.pop(request_id, None)
        self._cancels[request_id] = (known[0] if known else reason, now_s + self._memory_s)
        while self._cancels:
            oldest = next(iter(self._cancels))
            if len(self._cancels) <= self._max_remembered and self._cancels[oldest][1] > now_s:
                break
            del self._cancels[oldest]

    def reason(self, request_id: str, now_s: float) -> CancelReason | None:
        """Why the request is not wanted any more; None: nobody cancelled it."""
        known = self._cancels.get(request_id)
        return known[0] if known is not None and known[1] > now_s else None
