"""How fast a model's queue empties, and what that means for those who wait."""

from __future__ import annotations

from collections import deque

WINDOW_S = 10.0
_BUCKET_S = 0.25
_MIN_RETRY_S = 0.5
_MAX_RETRY_S = 60.0
_RETRY_UNKNOWN_S = 5.0


class Throughput:
    """Requests ended in the last seconds, by all workers of a model. Pure: time is passed in."""

    def __init__(self) -> None:
        self._buckets: deque[tuple[float, int]] = deque()
        self._total = 0

    def add(self, num_ended: int, now_s: float) -> None:
        start_s = now_s - now_s % _BUCKET_S
        if self._buckets and self._buckets[-1][0] == start_s:
            num_ended_before = self._buckets.pop()[1]
            self._buckets.append((start_s, num_ended_before + num_ended))
        else:
            self._buckets.append((start_s, num_ended))
        self._total += num_ended
        self._forget(now_s)

    def _forget(self, now_s: float) -> None:
        while self._buckets and self._buckets[0][0] <= now_s - WINDOW_S:
            self._total -= self._buckets.popleft()[1]

    def per_s(self, now_s: float) -> float:
        """Requests a second; 0 when none ended lately."""
        self._forget(now_s)
        if not self._buckets:
            return 0.0
        since_s = max(now_s - self._buckets[0][0], _BUCKET_S)
        return self._total / since_s


def eta_s(num_ahead: float, per_s: float) -> float | None:
    """How long until ``num_ahead`` requests are done; None when nobody knows."""
    if num_ahead <= 0:
        return 0.0
    return num_ahead / per_s if per_s > 0 else None


def retry_after_s(num_queued: int, bound: int, per_s: float) -> float:
    """When the queue will have capacity again: until it is at three quarters of its bound."""
    wait_s = eta_s(num_queued - bound * 3 // 4, per_s)
    if wait_s is None:
        return _RETRY_UNKNOWN_S
    return min(max(wait_s, _MIN_RETRY_S), _MAX_RETRY_S)
