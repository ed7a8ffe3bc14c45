"""Time that tests move on."""

from __future__ import annotations

import asyncio
import heapq
import itertools

_NS_PER_S = 1_000_000_000


class ManualClock:
    """Time that stands still until a test advances it; sleepers wake in the order of their time."""

    def __init__(self, now_ns: int = 1_700_000_000 * _NS_PER_S) -> None:
        self._start_ns = now_ns
        self._elapsed_s = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    def now_ns(self) -> int:
        return self._start_ns + round(self._elapsed_s * _NS_PER_S)

    def monotonic(self) -> float:
        return self._elapsed_s

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        due_s = self._elapsed_s + seconds
        heapq.heappush(self._sleepers, (due_s, next(self._order), future))
        await future

    async def advance(self, seconds: float) -> None:
        """Move on by ``seconds``, letting each sleeper run at the time that it asked for."""
        target_s = self._elapsed_s + seconds
        await _settle()
        while self._sleepers and self._sleepers[0][0] <= target_s:
            due_s, _, future = heapq.heappop(self._sleepers)
            self._elapsed_s = max(self._elapsed_s, due_s)
            if not future.done():
                future.set_result(None)
                await _settle()
        self._elapsed_s = max(self._elapsed_s, target_s)
        await _settle()

    def skip(self, seconds: float) -> None:
        """Advance by ``seconds`` without running any task, as if the process had been stopped."""
        self._elapsed_s += seconds

    @property
    def num_sleepers(self) -> int:
        """Number of tasks that wait for this clock."""
        return sum(not future.done() for _, _, future in self._sleepers)


async def _settle() -> None:
    """Let tasks that are ready run until they wait again, as far as a few loop turns go."""
    for _ in range(10):
        await asyncio.sleep(0)
