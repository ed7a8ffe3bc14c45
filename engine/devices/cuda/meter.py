"""Who is charged for the time that the device is busy."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Rows

from millrace.engine.step.sequence import Sequence


class DeviceMeter:
    """Shares the time that passes among the sequences that it passes for, by their weights.

    ``busy_s`` is all of it, ``charged_s`` what sequences were charged: the same, but for time of
    which nobody had a part.
    """

    def __init__(self) -> None:
        self.busy_s = 0.0
        self.charged_s = 0.0
        self._since_s = 0.0

    def start(self, now_s: float) -> None:
        """The device was idle until now."""
        self._since_s = now_s

    def charge(
        self, plan: Iterable[tuple[Sequence, int]], weights: Rows[float], now_s: float
    ) -> None:
        """Until now, the device was busy with ``plan`` since it was charged for last, or since it
        was idle. A weight of 0 is nobody's who can be charged."""
        passed_s = now_s - self._since_s
        self._since_s = now_s
        self.busy_s += passed_s
        total = sum(weights)
        if total <= 0:
            return
        self.charged_s += passed_s
        each_s = passed_s / total
        for (sequence, _), weight in zip(plan, weights, strict=True):
            sequence.device_s += each_s * weight
