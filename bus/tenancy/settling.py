"""Settlements in the background, which outlast an outage of Redis."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from pathlib import Path

import msgspec

from millrace.bus import redis_keys
from millrace.runtime.clock import Clock
from millrace.runtime.redis.link import RedisLink, RedisUnreachableError, Script
from millrace.runtime.redis.wire import Argument
from millrace.runtime.tasks import outcomes
from millrace.schemas.tenants import DEFAULT_CURRENCY

logger = logging.getLogger(__name__)

KEEP_MS = 3_600_000
"""Time for which a settled request is remembered, and a reservation after its deadline."""

_SETTLE = Script(Path(__file__).with_name("settle.lua").read_text(encoding="utf-8"))
_BOOK = Script(Path(__file__).with_name("book.lua").read_text(encoding="utf-8"))
_KEEP_MONTH_MS = 400 * 86_400_000
_NS_PER_MS = 1_000_000

_MAX_WAITING = 100_000
_BATCH = 256
_PAUSE_S = 1.0
_GIVE_UP_S = 600.0


class Settlement(msgspec.Struct, frozen=True, kw_only=True):
    """End of a request: its tokens (None: nothing was served), and its cost in billionths.

    - ``spent_keys``: keys of its accounts' spending, for a request that Redis may not know.
    - ``remember``: the request may be settled or reserved again.
    - ``job_id``: one job of the request has ended, and the gateway will settle the whole request.
      The job's cost is charged now and the gateway charges the rest. So the cost counts once, even
      if the gateway dies before the end.
    """

    request_id: str
    num_tokens: int | None
    cost_nano: int
    since_s: float
    spent_keys: tuple[str, ...] = ()
    currency: str = DEFAULT_CURRENCY
    remember: bool = False
    job_id: str = ""


class Settlements:
    """Settlements of reservations in Redis; without a link they do nothing.

    While Redis is unreachable, settlements are retried for ten minutes. ``num_lost`` counts
    settlements that were given up. Owns the task that sends them, which ``close`` ends. It does not
    own the link.
    """

    def __init__(self, link: RedisLink | None, clock: Clock, *, redis_time: bool = True) -> None:
        self._link = link
        self._clock = clock
        self._redis_time = redis_time
        self._waiting: deque[Settlement] = deque()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self.num_lost = 0

    @property
    def num_waiting(self) -> int:
        """Number of settlements that wait for Redis."""
        return len(self._waiting)

    async def settle(self, settlement: Settlement) -> bool:
        """Settle a reservation.

        Returns True if this call settled it. False if it was settled before, or if Redis is
        unreachable. It is then retried in the background.
        """
        if self._link is None:
            return False
        try:
            return await self._send(settlement)
        except RedisUnreachableError:
            self.settle_soon(settlement)
            return False

    def settle_soon(self, settlement: Settlement) -> None:
        """Settle in the background. Needs a running event loop."""
        if self._link is None:
            return
        if self._closed or len(self._waiting) >= _MAX_WAITING:
            self._lose(1)
            return
        self._waiting.append(settlement)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    async def close(self, timeout_s: float) -> None:
        """Send pending settlements, for at most ``timeout_s``. The rest is lost."""
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
            # They leave the queue only when they are sent, so none is lost on the way.
            batch = [self._waiting[i] for i in range(min(_BATCH, len(self._waiting)))]
            sent = await outcomes([self._send(settlement) for settlement in batch])
            again: list[Settlement] = []
            for settlement, outcome in zip(batch, sent, strict=True):
                self._waiting.popleft()
                if isinstance(outcome, RedisUnreachableError):
                    again.append(settlement)
                elif isinstance(outcome, Exception):
                    logger.error("a settlement failed", exc_info=outcome)
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
            logger.warning("settlements were given up", extra={"num_lost": count})

    async def _send(self, settlement: Settlement) -> bool:
        assert self._link is not None, "settling needs a link to Redis"
        keys = [
            redis_keys.reservation_key(settlement.request_id),
            redis_keys.booked_key(settlement.request_id),
        ]
        arguments: list[Argument]
        if settlement.job_id:
            arguments = [
                settlement.request_id,
                settlement.job_id,
                settlement.cost_nano,
                _KEEP_MONTH_MS,
                redis_keys.currency_suffix(settlement.currency),
            ]
            return bool(await self._link.evaluate(_BOOK, keys, arguments))
        keys += settlement.spent_keys
        arguments = [
            script_time(self._clock, redis_time=self._redis_time),
            settlement.request_id,
            "" if settlement.num_tokens is None else settlement.num_tokens,
            settlement.cost_nano,
            KEEP_MS,
            _KEEP_MONTH_MS,
            int(settlement.remember),
            redis_keys.currency_suffix(settlement.currency),
        ]
        return bool(await self._link.evaluate(_SETTLE, keys, arguments))


def script_time(clock: Clock, *, redis_time: bool) -> Argument:
    """Return the time in ms for scripts; empty: they use Redis' clock."""
    return "" if redis_time else clock.now_ns() // _NS_PER_MS
