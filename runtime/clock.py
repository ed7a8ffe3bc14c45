"""Time, passed in: the wall clock for what crosses processes, the monotonic one for durations."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Where a component gets its time from."""

    def now_ns(self) -> int:
        """UTC epoch in ns; comparable between processes."""

    def monotonic(self) -> float:
        """Seconds that never go back; comparable within this process only."""

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The machine's own time."""

    def now_ns(self) -> int:
        return time.time_ns()

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


# A beat that is nearer than this share of its interval is the one that was just waited for.
_SAME_BEAT = 1 / 8


def until_beat_s(clock: Clock, interval_s: float) -> float:
    """How long something that is done every ``interval_s`` sleeps: until the next multiple of that
    on the monotonic clock, which all processes of a machine share. What a machine does from time to
    time is then done together, and it wakes up once for all of it."""
    if interval_s <= 0:
        return 0.0
    left_s = interval_s - clock.monotonic() % interval_s
    return left_s if left_s > interval_s * _SAME_BEAT else left_s + interval_s
