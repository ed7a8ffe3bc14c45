"""Index of running requests in Redis: a hint that saves requests, never authoritative.

Leases and heartbeats decide. While Redis is unreachable nothing is known and everything goes on.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from millrace.bus import codec, redis_keys
from millrace.runtime.clock import Clock
from millrace.runtime.redis.link import RedisLink, RedisUnreachableError, Script
from millrace.runtime.redis.wire import Argument
from millrace.schemas.config import RedisConfig
from millrace.schemas.jobs import Job

TTL_S = 3600
CANCELS_TTL_S = 86_400
MAX_CANCELS = 100_000

# KEYS: the request's key, the worker's requests. ARGV: worker id, epoch, finished, TTL in s,
# request id, lease (empty: unknown, or over). A finished request stays finished. A run of an older
# epoch was superseded and changes nothing. The end of a shed job (epoch 0) changes nothing if a
# message has claimed the id: that job may be another tenant's.
_WRITE = Script(
    """
local known = redis.call('HMGET', KEYS[1], 'epoch', 'finished')
if ARGV[2] == '0' and redis.call('HEXISTS', KEYS[1], 'sequence') == 1 then return 0 end
if known[2] == '1' or (known[1] and tonumber(known[1]) > tonumber(ARGV[2])) then return 0 end
redis.call('HSET', KEYS[1], 'worker_id', ARGV[1], 'epoch', ARGV[2], 'finished', ARGV[3])
redis.call('EXPIRE', KEYS[1], ARGV[4])
if ARGV[6] == '' then
  redis.call('HDEL', KEYS[2], ARGV[5])
else
  redis.call('HSET', KEYS[2], ARGV[5], ARGV[6])
  redis.call('EXPIRE', KEYS[2], ARGV[4])
end
return 1
"""
)


# KEYS: the request's key. ARGV: a model, the reason of its choice, TTL in s. Returns the first
# choice.
_SETTLE = Script(
    """
local known = redis.call('HMGET', KEYS[1], 'model', 'route_reason')
if known[1] then return known end
redis.call('HSET', KEYS[1], 'model', ARGV[1], 'route_reason', ARGV[2])
redis.call('EXPIRE', KEYS[1], ARGV[3])
return {ARGV[1], ARGV[2]}
"""
)


# KEYS: the request's key. ARGV: an adapter's version, TTL in s. Returns the first version.
_SETTLE_ADAPTER = Script(
    """
redis.call('HSETNX', KEYS[1], 'adapter_version', ARGV[1])
redis.call('EXPIRE', KEYS[1], ARGV[2])
return redis.call('HGET', KEYS[1], 'adapter_version')
"""
)


# KEYS: the request's key. ARGV: the message's place in the queue; its job's digest, reply and
# tenant; TTL in s; whether the message is known to be new; the place of a void claim. Returns the
# claim of another message, if there is one. A running request without a claim belongs to another
# message, too.
_CLAIM = Script(
    """
local known = redis.call('HMGET', KEYS[1], 'sequence', 'digest', 'reply', 'tenant', 'worker_id')
local is_taken = (known[1] and known[1] ~= ARGV[1] and known[1] ~= ARGV[7])
  or (not known[1] and known[5] and ARGV[6] == '1')
if is_taken then return {known[1] or '0', known[2] or '', known[3] or '', known[4] or ''} end
redis.call('HSET', KEYS[1], 'sequence', ARGV[1], 'digest', ARGV[2], 'reply', ARGV[3],
  'tenant', ARGV[4])
redis.call('EXPIRE', KEYS[1], ARGV[5])
return {}
"""
)


# KEYS: the tenant's cancels. ARGV: the time, the number kept, TTL in s, then the request ids.
_NOTE_CANCELS = Script(
    """
for i = 4, #ARGV do redis.call('ZADD', KEYS[1], ARGV[1], ARGV[i]) end
redis.call('ZREMRANGEBYRANK', KEYS[1], 0, -1 - ARGV[2])
redis.call('EXPIRE', KEYS[1], ARGV[3])
return 1
"""
)


class JobClaim(msgspec.Struct, frozen=True, kw_only=True):
    """Claim of a message on a request id.

    ``sequence`` is its place in the queue (0: unknown). ``digest`` identifies its job. It covers
    all fields except those for delivery, times and tracing.
    """

    sequence: int
    digest: str = ""
    reply: str = ""
    tenant: str = ""

    @classmethod
    def of(cls, job: Job, sequence: int) -> JobClaim:
        """Make the claim of a job whose message is at ``sequence`` in the queue."""
        asked = msgspec.structs.replace(
            job,
            reply="",
            frames_as_json=False,
            batch_frames=False,
            store_result=False,
            received_ns=0,
            deadline_ns=None,
            traceparent="",
        )
        digest = hashlib.blake2b(codec.encode(asked), digest_size=16).hexdigest()
        return cls(sequence=sequence, digest=digest, reply=job.reply, tenant=job.tenant)


class RunningRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Last known run of a request: worker, epoch, and whether it is answered."""

    worker_id: str
    epoch: int
    finished: bool


class RunningRequestIndex:
    """Index of running requests. Calls never raise, except ``check``. Owns its link to Redis."""

    def __init__(self, config: RedisConfig, clock: Clock | None = None) -> None:
        self._link = RedisLink(config, clock)

    async def check(self) -> None:
        """Check the connection. See ``RedisLink.check``."""
        await self._link.check()

    async def start(self, request_id: str, worker_id: str, epoch: int, lease: str = "") -> None:
        """Note that a worker runs the request under a lease."""
        await self._write(request_id, worker_id, epoch, finished=0, lease=lease)

    async def drop(self, request_id: str, worker_id: str) -> None:
        """Note that the worker no longer runs the request, as another does or will."""
        await self._call("HDEL", redis_keys.held_key(worker_id), request_id)

    async def held_by(self, worker_id: str) -> dict[str, str]:
        """Return the known leases of a worker's requests, by request id.

        Another worker may have taken some over since: ``lookup`` tells.
        """
        found: dict[bytes, bytes] | None = await self._call(
            "HGETALL", redis_keys.held_key(worker_id)
        )
        return {key.decode(): lease.decode() for key, lease in (found or {}).items()}

    async def finish(self, request_id: str, worker_id: str, epoch: int) -> None:
        """Mark the request as answered. It need not run again."""
        await self._write(request_id, worker_id, epoch, finished=1)

    async def lookup(self, request_id: str) -> RunningRequest | None:
        """Return the entry of a request; None if it is unknown or Redis is unreachable."""
        key = redis_keys.generation_key(request_id)
        found: list[bytes | None] | None = await self._call(
            "HMGET", key, "worker_id", "epoch", "finished"
        )
        if found is None or found[0] is None or found[1] is None:
            return None
        return RunningRequest(
            worker_id=found[0].decode(), epoch=int(found[1]), finished=found[2] == b"1"
        )

    async def has_ended(self, tenant: str, request_id: str) -> bool | None:
        """Return whether a tenant's published request has ended.

        None: the tenant has no such request, or Redis is unreachable.
        """
        key = redis_keys.generation_key(request_id)
        found: list[bytes | None] | None = await self._call("HMGET", key, "tenant", "finished")
        if found is None or found[0] is None or found[0].decode() != tenant:
            return None
        return found[1] == b"1"

    async def claim(
        self, request_id: str, mine: JobClaim, *, is_new: bool, void_sequence: int = 0
    ) -> JobClaim | None:
        """Claim a request id for a message of the queue.

        Args:
            request_id: The id.
            mine: The message's claim.
            is_new: The message was not delivered before, so a running request with its id belongs
                to another message.
            void_sequence: Place of a claim that is void.

        Returns:
            The claim of another message that owns the id. None if the id is now this message's, or
            while Redis is unreachable.
        """
        key = redis_keys.generation_key(request_id)
        arguments: list[Argument] = [
            *(mine.sequence, mine.digest, mine.reply, mine.tenant),
            *(TTL_S, int(is_new), void_sequence or ""),
        ]
        try:
            found: list[bytes] = await self._link.evaluate(_CLAIM, [key], arguments)
        except RedisUnreachableError:
            return None
        if not found:
            return None
        sequence, digest, reply, tenant = (one.decode() for one in found)
        return JobClaim(sequence=int(sequence), digest=digest, reply=reply, tenant=tenant)

    async def note_cancels(self, tenant: str, request_ids: Sequence[str]) -> None:
        """Store cancels by the tenant's services.

        The newest ``MAX_CANCELS`` of each tenant are kept, for a day after the last.
        """
        key = redis_keys.cancels_key(tenant)
        arguments: list[Argument] = [time.time_ns(), MAX_CANCELS, CANCELS_TTL_S, *request_ids]
        try:
            await self._link.evaluate(_NOTE_CANCELS, [key], arguments)
        except RedisUnreachableError:
            return  # The schedulers that heard the cancel remember it, too.

    async def was_cancelled(self, tenant: str, request_id: str) -> bool:
        """Return whether a tenant's service cancelled a request; False while Redis is
        unreachable."""
        key = redis_keys.cancels_key(tenant)
        return await self._call("ZSCORE", key, request_id) is not None

    async def settle_model(self, request_id: str, model: str, reason: str) -> tuple[str, str]:
        """Return the model first chosen for a request, and why.

        That is the given one if none was chosen or Redis is unreachable.
        """
        key = redis_keys.generation_key(request_id)
        try:
            found = await self._link.evaluate(_SETTLE, [key], [model, reason, TTL_S])
        except RedisUnreachableError:
            return model, reason
        return found[0].decode(), found[1].decode()

    async def settle_adapter(self, request_id: str, version: str) -> str:
        """Return the adapter version first chosen for a request.

        That is the given one if none was chosen or Redis is unreachable.
        """
        key = redis_keys.generation_key(request_id)
        try:
            found: bytes = await self._link.evaluate(_SETTLE_ADAPTER, [key], [version, TTL_S])
        except RedisUnreachableError:
            return version
        return found.decode()

    async def close(self) -> None:
        """Close the link. Pending calls end as if Redis were unreachable."""
        await self._link.close()

    async def _write(
        self, request_id: str, worker_id: str, epoch: int, finished: int, lease: str = ""
    ) -> None:
        keys = [redis_keys.generation_key(request_id), redis_keys.held_key(worker_id)]
        arguments: list[Argument] = [worker_id, epoch, finished, TTL_S, request_id, lease]
        try:
            await self._link.evaluate(_WRITE, keys, arguments)
        except RedisUnreachableError:
            # The index is a hint: leases and heartbeats decide, also while Redis takes no writes.
            return

    async def _call(self, *command: Argument) -> Any:
        try:
            return await self._link.call(*command)
        except RedisUnreachableError:
            return None
