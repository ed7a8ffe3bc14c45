"""Clocks: wall time between processes, monotonic time for durations."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Clock of a component."""

    def now_ns(self) -> int:
        """Return the UTC epoch in ns, comparable between processes."""

    def monotonic(self) -> float:
        """Return seconds that never decrease, comparable within this process only."""

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """Clock of the machine."""

    def now_ns(self) -> int:
        return time.time_ns()

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


# A beat within this share of an interval counts as the present beat.
_SAME_BEAT = 1 / 8


def until_beat_s(clock: Clock, interval_s: float) -> float:
    """Return the seconds until the next beat: a multiple of ``interval_s`` on the monotonic clock.

    All processes of a machine share that clock. So periodic work of a machine is done together, and
    it wakes up once for all of it.
    """
    if interval_s <= 0:
        return 0.0
    left_s = interval_s - clock.monotonic() % interval_s
    return left_s if left_s > interval_s * _SAME_BEAT else left_s + interval_s
