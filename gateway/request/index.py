"""Index of requests in Redis: the state that another gateway needs to continue an answer."""

from __future__ import annotations

import hashlib

import msgspec

from millrace.bus import redis_keys
from millrace.gateway.tools.runner import ToolResult
from millrace.registry.requests.generation_request import GenerationRequest
from millrace.runtime.redis.link import RedisLink, RedisUnreachableError, Script, reachable
from millrace.schemas.chat.asked import Asked
from millrace.schemas.chat.reasoning import ReasoningFormat
from millrace.schemas.errors import MillraceError
from millrace.schemas.jobs import Source, Tier
from millrace.schemas.sessions import SessionInfo

_STATE_TTL_S = 2 * 3600

# KEYS: the claim. ARGV: digest of the request, request id, TTL in s. Returns the digest and the
# request id that hold the key now.
_CLAIM = Script(
    """
local known = redis.call('HMGET', KEYS[1], 'digest', 'request_id')
if known[1] then return known end
redis.call('HSET', KEYS[1], 'digest', ARGV[1], 'request_id', ARGV[2])
redis.call('EXPIRE', KEYS[1], ARGV[3])
return {ARGV[1], ARGV[2]}
"""
)

# KEYS: the claim. ARGV: the request id that gives it up.
_RELEASE = Script(
    """
if redis.call('HGET', KEYS[1], 'request_id') ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
"""
)


# One entry per prompt of a request.
PromptTokenIds = tuple[tuple[int, ...], ...]


class RequestState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """State of an accepted request. Its frames are sent to the gateway ``origin``; the gateway
    ``holder`` has the client that receives them now. ``request`` lacks the prompt unless a later
    round needs it. ``traceparent`` is the request's place in its trace, empty without one.
    ``key_id`` is the caller's API key; ``asked`` describes the call. ``reasoning`` tells how its
    completions begin with thoughts. ``prompt_token_ids`` has the ids of each prompt if the request
    asked for them. ``was_counted``: a former gateway recorded the end of the request.
    """

    request_id: str
    tenant: str
    origin: str
    holder: str
    source: Source
    tier: Tier
    created_ns: int
    deadline_ns: int
    keep_result: bool
    request: GenerationRequest = msgspec.field(name="ask")  # what it is called in Redis
    session: SessionInfo | None = None
    idempotency_key: str = ""
    traceparent: str = ""
    reasoning: ReasoningFormat | None = None
    key_id: str = ""
    prompt_token_ids: PromptTokenIds = ()
    was_counted: bool = False
    asked: Asked = Asked()


class IdempotencyConflictError(MillraceError, code="idempotency_conflict", http_status=409):
    """Idempotency key that was used with a different request."""

    def __init__(self) -> None:
        super().__init__(
            "This Idempotency-Key was used with another request. Draw a new key for each request."
        )


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(RequestState)
_step_decoder = msgspec.msgpack.Decoder(ToolResult)


class RequestIndex:
    """Index over one Redis link. With ``link`` None nothing can be stored or claimed."""

    def __init__(self, link: RedisLink | None, idempotency_ttl_s: float) -> None:
        self._link = link
        self._idempotency_ttl_s = round(idempotency_ttl_s)

    async def put(self, state: RequestState) -> None:
        """Store a state, unless Redis is unreachable: then only this gateway knows the request."""
        ttl_s = self._idempotency_ttl_s if state.keep_result else _STATE_TTL_S
        key = redis_keys.request_key(state.request_id)
        try:
            await reachable(self._link).call("SET", key, _encoder.encode(state), "EX", ttl_s)
        except RedisUnreachableError:
            return

    async def get(self, request_id: str) -> RequestState | None:
        """Return the state of a request; None if it is unknown. Raises RedisUnreachableError."""
        if self._link is None:
            return None
        stored = await self._link.call("GET", redis_keys.request_key(request_id))
        return None if stored is None else _decoder.decode(stored)

    async def put_step(self, request_id: str, call_id: str, result: ToolResult) -> None:
        """Store a tool's result, so that no gateway has to run the tool again."""
        key = redis_keys.request_steps_key(request_id)
        try:
            link = reachable(self._link)
            await link.call("HSET", key, call_id, _encoder.encode(result))
            await link.call("EXPIRE", key, _STATE_TTL_S)
        except RedisUnreachableError:
            return

    async def get_step(self, request_id: str, call_id: str) -> ToolResult | None:
        """Return the stored result of a tool; None if there is none."""
        try:
            key = redis_keys.request_steps_key(request_id)
            stored = await reachable(self._link).call("HGET", key, call_id)
        except RedisUnreachableError:
            return None
        return None if stored is None else _step_decoder.decode(stored)

    async def claim(self, tenant: str, key: str, digest: str, request_id: str) -> str:
        """Claim a key. Return the request id that holds it: ``request_id``, or the id of an
        earlier, equal request.

        Raises IdempotencyConflictError if the earlier request was different, and
        RedisUnreachableError.
        """
        claim_key = redis_keys.idempotency_key(tenant, key)
        known: list[bytes] = await reachable(self._link).evaluate(
            _CLAIM, [claim_key], [digest, request_id, self._idempotency_ttl_s]
        )
        if known[0].decode() != digest:
            raise IdempotencyConflictError
        return known[1].decode()

    async def release(self, tenant: str, key: str, request_id: str) -> None:
        """Release the key: its request was not answered and may be tried again."""
        try:
            claim_key = redis_keys.idempotency_key(tenant, key)
            await reachable(self._link).evaluate(_RELEASE, [claim_key], [request_id])
        except RedisUnreachableError:
            return


def digest_of(*parts: bytes) -> str:
    """Return a digest that distinguishes requests with one key."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()
