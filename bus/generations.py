"""Who runs which request, in Redis: a hint that spares questions, never the truth itself.

Leases and heartbeats decide; while Redis is away nothing is known and everything goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import Any, cast

import msgspec
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from bus import subjects
from bus.clock import Clock, SystemClock
from schemas.config import RedisConfig

logger = logging.getLogger(__name__)

TTL_S = 3600
_TIMEOUT_S = 0.3
_PAUSE_S = 1.0
_MAX_BATCH = 512

# KEYS: the request's. ARGV: worker id, epoch, finished, TTL in s. A request that is finished stays
# so, and a run of an older epoch, which was superseded, changes nothing.
_WRITE = """
local known = redis.call('HMGET', KEYS[1], 'epoch', 'finished')
if known[2] == '1' or (known[1] and tonumber(known[1]) > tonumber(ARGV[2])) then return 0 end
redis.call('HSET', KEYS[1], 'worker_id', ARGV[1], 'epoch', ARGV[2], 'finished', ARGV[3])
redis.call('EXPIRE', KEYS[1], ARGV[4])
return 1
"""


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """Who ran a request last, at what epoch, and whether it is answered."""

    worker_id: str
    epoch: int
    finished: bool


_Command = tuple[str | int, ...]


class GenerationIndex:
    """Calls never raise. Those made at the same time travel together.

    Owns its connections and the task that sends; ``close`` ends them.
    """

    def __init__(self, config: RedisConfig, clock: Clock | None = None) -> None:
        self._clock: Clock = clock or SystemClock()
        self._redis = Redis.from_url(
            config.url,
            decode_responses=True,
            socket_timeout=_TIMEOUT_S,
            socket_connect_timeout=_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
        )
        self._waiting: list[tuple[_Command, asyncio.Future[Any]]] = []
        self._sending: asyncio.Task[None] | None = None
        self._is_away = False
        self._next_try_s = 0.0
        self._closed = False

    async def start(self, request_id: str, worker_id: str, epoch: int) -> None:
        """The worker runs the request from now on."""
        await self._write(request_id, worker_id, epoch, finished=0)

    async def finish(self, request_id: str, worker_id: str, epoch: int) -> None:
        """The request is answered; nobody needs to run it again."""
        await self._write(request_id, worker_id, epoch, finished=1)

    async def lookup(self, request_id: str) -> Generation | None:
        """None: nothing is known, or nobody can say."""
        key = subjects.generation_key(request_id)
        found = await self._call("HMGET", key, "worker_id", "epoch", "finished")
        if found is None or found[1] is None:
            return None
        return Generation(worker_id=found[0], epoch=int(found[1]), finished=found[2] == "1")

    async def close(self) -> None:
        """Calls that still wait end as if Redis were away."""
        self._closed = True
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)
        self._give_up(self._waiting)
        self._waiting = []
        try:
            await self._redis.aclose()
        except (RedisError, OSError) as error:
            logger.debug("Redis did not close cleanly", extra={"cause": repr(error)})

    async def _write(self, request_id: str, worker_id: str, epoch: int, finished: int) -> None:
        key = subjects.generation_key(request_id)
        await self._call("EVAL", _WRITE, 1, key, worker_id, epoch, finished, TTL_S)

    async def _call(self, *command: str | int) -> Any:
        if self._closed or (self._is_away and self._clock.monotonic() < self._next_try_s):
            return None
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((command, future))
        if self._sending is None or self._sending.done():
            self._sending = asyncio.ensure_future(self._send())
        return await future

    async def _send(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:_MAX_BATCH], self._waiting[_MAX_BATCH:]
            try:
                pipeline = self._redis.pipeline(transaction=False)
                for command, _ in batch:
                    pipeline.execute_command(*command)
                answers = await cast("Awaitable[list[Any]]", pipeline.execute())
            except (RedisError, OSError, TimeoutError) as error:
                self._went_away(error)
                self._give_up(batch)
                self._give_up(self._waiting)
                self._waiting = []
                return
            except asyncio.CancelledError:
                self._give_up(batch)
                raise
            self._came_back()
            for (_, future), answer in zip(batch, answers, strict=True):
                if not future.done():
                    future.set_result(answer)

    def _give_up(self, batch: list[tuple[_Command, asyncio.Future[Any]]]) -> None:
        for _, future in batch:
            if not future.done():
                future.set_result(None)

    def _went_away(self, error: Exception) -> None:
        self._next_try_s = self._clock.monotonic() + _PAUSE_S
        if not self._is_away:
            self._is_away = True
            logger.warning(
                "Redis is away; nobody knows who runs what until it is back",
                extra={"cause": repr(error)},
            )

    def _came_back(self) -> None:
        if self._is_away:
            self._is_away = False
            logger.info("Redis is back")
