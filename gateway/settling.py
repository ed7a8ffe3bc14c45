"""Settlements that nobody waits for, and that outlast an absence of Redis."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable

import msgspec

from bus.clock import Clock
from bus.redis_link import RedisAwayError

_log = logging.getLogger(__name__)

_MAX_WAITING = 100_000
_BATCH = 256
_PAUSE_S = 1.0
_GIVE_UP_S = 600.0


class Settlement(msgspec.Struct, frozen=True, kw_only=True):
    """How a request ended: its tokens (None: nothing was served) and what it cost in billionths.

    ``spent_keys`` are for one that Redis may not know of: where its accounts keep what they spent.
    """

    request_id: str
    num_tokens: int | None
    cost_nano: int
    since_s: float
    spent_keys: tuple[str, ...] = ()


class Settler:
    """Sends settlements in the background, again and again for ten minutes while Redis is away.

    Owns its task; ``close`` ends it. ``num_lost`` counts those that were given up.
    """

    def __init__(self, send: Callable[[Settlement], Awaitable[object]], clock: Clock) -> None:
        self._send = send
        self._clock = clock
        self._waiting: deque[Settlement] = deque()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self.num_lost = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def put(self, settlement: Settlement) -> None:
        """Returns at once. Needs a running event loop."""
        if self._closed or len(self._waiting) >= _MAX_WAITING:
            self._lose(1)
            return
        self._waiting.append(settlement)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    async def close(self, timeout_s: float) -> None:
        """Send what waits, for at most ``timeout_s``; what is left is lost."""
        self._closed = True
        task = self._task
        if task is not None:
            await asyncio.wait([task], timeout=timeout_s)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._lose(len(self._waiting))
        self._waiting.clear()

    async def _run(self) -> None:
        while self._waiting:
            # They leave the queue when they are sent, so that none is lost on the way.
            batch = [self._waiting[i] for i in range(min(_BATCH, len(self._waiting)))]
            outcomes = await asyncio.gather(*map(self._send, batch), return_exceptions=True)
            again: list[Settlement] = []
            for settlement, outcome in zip(batch, outcomes, strict=True):
                self._waiting.popleft()
                if isinstance(outcome, RedisAwayError):
                    again.append(settlement)
                elif isinstance(outcome, Exception):
                    _log.error("a settlement failed", exc_info=outcome)
                    self._lose(1)
            oldest_s = self._clock.monotonic() - _GIVE_UP_S
            kept = [settlement for settlement in again if settlement.since_s >= oldest_s]
            self._lose(len(again) - len(kept))
            self._waiting.extendleft(reversed(kept))
            if again:
                await self._clock.sleep(_PAUSE_S)

    def _lose(self, count: int) -> None:
        if count:
            self.num_lost += count
            _log.warning("settlements were given up", extra={"num_lost": count})
