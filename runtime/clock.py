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
