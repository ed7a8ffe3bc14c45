"""Conversations in Redis: each one compressed value that is replaced whole, by compare-and-set.

A conversation is a hash with ``version`` (the number of its changes), ``data`` (compressed JSON)
and ``floor`` (the version at which it was last deleted). The addition of a request waits under a
key of its own until the request is answered, so that any gateway can add it, and only once.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from millrace.bus import redis_keys
from millrace.gateway.sessions.context_window import Counted, continue_with, num_leading
from millrace.runtime.clock import Clock
from millrace.runtime.redis.link import RedisLink, Script, reachable
from millrace.runtime.tasks import in_thread_if
from millrace.schemas.config import GatewayConfig
from millrace.schemas.errors import MillraceError
from millrace.schemas.jobs import Tier

_Value = TypeVar("_Value")

# Each attempt fails only because another one succeeded.
_MAX_ATTEMPTS = 64
_COMPRESSION_LEVEL = 1
_MAX_INLINE_BYTES = 64 * 1024
_MARGIN_S = 60.0
# Time during which adding an answer is retried while Redis is unreachable.
COMMIT_TIMEOUT_S = 60.0
_COMMITTED, _DELETED, _CHANGED = -1, -2, -3

# KEYS: the conversation. ARGV: its new time to live in ms (0: unchanged).
_LOAD = Script(
    """
local found = redis.call('HMGET', KEYS[1], 'version', 'data')
if found[2] and tonumber(ARGV[1]) > 0 then redis.call('PEXPIRE', KEYS[1], ARGV[1]) end
return {tonumber(found[1] or '0'), found[2] or '', redis.call('PTTL', KEYS[1])}
"""
)

# KEYS: the conversation and, optionally, the waiting turn. ARGV: the expected version, the version
# that the change is based on, the new data, time to live in ms. Returns the new version.
_STORE = Script(
    """
if KEYS[2] and redis.call('EXISTS', KEYS[2]) == 0 then return -1 end
local known = redis.call('HMGET', KEYS[1], 'version', 'floor')
local version = tonumber(known[1] or '0')
if tonumber(known[2] or '0') > tonumber(ARGV[2]) then
  if KEYS[2] then redis.call('DEL', KEYS[2]) end
  return -2
end
if version ~= tonumber(ARGV[1]) then return -3 end
redis.call('HSET', KEYS[1], 'version', version + 1, 'data', ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
if KEYS[2] then redis.call('DEL', KEYS[2]) end
return version + 1
"""
)

# KEYS: the conversation. ARGV: the time in ms for which its deletion is remembered, so that running
# requests do not restore it.
_DELETE = Script(
    """
local known = redis.call('HMGET', KEYS[1], 'version', 'data')
local version = tonumber(known[1] or '0') + 1
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'version', version, 'floor', version)
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return known[2] and 1 or 0
"""
)


class SessionTooLargeError(MillraceError, code="session_too_large", http_status=413):
    """Conversation beyond the size limit."""

    param = "session_id"

    def __init__(self, size: int, limit: int, unit: str) -> None:
        super().__init__(
            f"With this request the session would hold {size} {unit}; the limit is {limit} {unit}. "
            "Start another session, or keep less of this one."
        )


class SessionUnreadableError(MillraceError, code="session_unreadable", http_status=409):
    """Stored session in an unknown format."""

    param = "session_id"

    def __init__(self) -> None:
        super().__init__("The stored session cannot be read. Delete it, or use another one.")


class SessionBusyError(MillraceError, code="session_busy", http_status=503, retryable=True):
    """Conversation changed by too many requests at the same time."""

    def __init__(self) -> None:
        super().__init__("Too many requests change this session at once. Try again in a moment.")


class Session(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Conversation. ``messages`` follow on the ``num_summarised`` messages that ``summary``
    replaces.

    ``turn_version`` is the version that the newest turn made. ``num_bytes`` is the size of its JSON
    when read, ``expires_in_s`` its remaining time to live.
    """

    version: int = 0
    turn_version: int = 0
    messages: tuple[Counted, ...] = ()
    summary: str = ""
    num_summarised: int = 0
    updated_ns: int = 0
    num_bytes: int = 0
    expires_in_s: float = 0.0

    @property
    def num_messages(self) -> int:
        """Return the number of messages, including the summarised ones."""
        return self.num_summarised + len(self.messages)

    @property
    def least_keep(self) -> int:
        """Return the number of leading messages that can no longer be told apart: the summarised
        messages and the leading system messages that stayed.
        """
        if not self.num_summarised:
            return 0
        return self.num_summarised + num_leading(one.message for one in self.messages)

    def cut(self, keep: int | None) -> Session:
        """Return the conversation with its first ``keep`` messages (None: all of them). ``keep`` is
        0, or at least ``least_keep``.
        """
        if keep is None:
            return self
        if keep == 0:
            return msgspec.structs.replace(self, messages=(), summary="", num_summarised=0)
        assert keep >= self.least_keep
        kept = self.messages[: keep - self.num_summarised]
        return msgspec.structs.replace(self, messages=kept)


class Turn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Addition to a conversation at ``base_version``, of which the first ``keep`` messages stay
    (None: all). ``model``, its window, and the caller's ``tier`` are the request's.
    """

    base_version: int = 0
    keep: int | None = None
    messages: tuple[Counted, ...] = ()
    model: str = ""
    window_tokens: int = 0
    tier: Tier = Tier.FREE

    def added_to(self, session: Session) -> Session:
        """Return ``session`` with the turn. Turns that were added concurrently stay, before this
        turn.
        """
        is_base = session.turn_version <= self.base_version <= session.version
        # The conversation may have been summarised since.
        can_cut = not self.keep or self.keep >= session.least_keep
        cut = session.cut(self.keep if is_base and can_cut else None)
        history, turn = continue_with(cut.messages, self.messages)
        return msgspec.structs.replace(cut, messages=(*history, *turn))


_SESSIONS = msgspec.json.Decoder(Session)
_TURNS = msgspec.json.Decoder(Turn)


class SessionStore:
    """Store of conversations, their only reader and writer. Without a link, Redis counts as
    unreachable.

    All calls raise RedisUnreachableError; then the change may or may not have been made.
    """

    def __init__(self, link: RedisLink | None, config: GatewayConfig, clock: Clock) -> None:
        self._link = link
        self._config = config
        self._clock = clock
        self._ttl_ms = _ms(config.session_ttl_s)
        # A turn waits for the maximum duration of its request and of adding its answer late.
        self._turn_ttl_ms = _ms(config.request_timeout_s + COMMIT_TIMEOUT_S + _MARGIN_S)

    async def load(self, tenant: str, session_id: str, *, renew: bool = False) -> Session:
        """Return the conversation, an empty one if there is none. ``renew`` restarts its time to
        live. Raises SessionUnreadableError.
        """
        key = redis_keys.session_key(tenant, session_id)
        version, data, pttl_ms = await reachable(self._link).evaluate(
            _LOAD, [key], [self._ttl_ms if renew else 0]
        )
        if not data:
            return Session(version=version)
        session, num_bytes = await in_thread_if(
            len(data) > _MAX_INLINE_BYTES, lambda: _decode(_SESSIONS, data)
        )
        return msgspec.structs.replace(
            session, version=version, num_bytes=num_bytes, expires_in_s=max(0, pttl_ms) / 1e3
        )

    def check_room(self, session: Session, turn: Turn) -> None:
        """Raise SessionTooLargeError if the conversation has no room for a request's addition."""
        history = session.cut(turn.keep).messages
        num_bytes = session.num_bytes + len(msgspec.json.encode(turn.messages))
        if turn.keep is not None and num_bytes > self._config.session_max_bytes:
            num_bytes -= session.num_bytes - len(msgspec.json.encode(history))
        self._check_size(len(history) + len(turn.messages), num_bytes)

    def _check_size(self, num_messages: int, num_bytes: int) -> None:
        if num_messages > self._config.session_max_messages:
            raise SessionTooLargeError(num_messages, self._config.session_max_messages, "messages")
        if num_bytes > self._config.session_max_bytes:
            raise SessionTooLargeError(num_bytes, self._config.session_max_bytes, "bytes")

    async def put_turn(self, tenant: str, session_id: str, request_id: str, turn: Turn) -> None:
        """Store a request's addition until it is answered."""
        key = redis_keys.session_turn_key(tenant, session_id, request_id)
        data = await _encoded(turn)
        await reachable(self._link).call("SET", key, data, "PX", self._turn_ttl_ms)

    async def drop_turn(self, tenant: str, session_id: str, request_id: str) -> None:
        """Delete the addition of a refused request."""
        await reachable(self._link).call(
            "DEL", redis_keys.session_turn_key(tenant, session_id, request_id)
        )

    async def turn(self, tenant: str, session_id: str, request_id: str) -> Turn | None:
        """Return the addition of a request; None if it was added or has expired. Raises
        SessionUnreadableError.
        """
        data = await reachable(self._link).call(
            "GET", redis_keys.session_turn_key(tenant, session_id, request_id)
        )
        return None if data is None else _decode(_TURNS, data)[0]

    async def append(
        self, tenant: str, session_id: str, turn: Turn, request_id: str = ""
    ) -> Session | None:
        """Return the conversation with the turn in it; None if the conversation was deleted since
        the turn's base, or if the addition of ``request_id``, if given, was added before.

        Raises SessionBusyError, SessionUnreadableError, and SessionTooLargeError if concurrent
        requests have filled it.
        """
        keys = [redis_keys.session_key(tenant, session_id)]
        if request_id:
            keys.append(redis_keys.session_turn_key(tenant, session_id, request_id))
        for _ in range(_MAX_ATTEMPTS):
            session = await self.load(tenant, session_id)
            changed = msgspec.structs.replace(
                turn.added_to(session),
                turn_version=session.version + 1,
                updated_ns=self._clock.now_ns(),
            )
            if len(changed.messages) > len(session.messages):
                # Concurrent requests all found room: their additions may pass the bounds once.
                self._check_size(len(session.messages), session.num_bytes)
            data = await _encoded(_stored(changed))
            version = await self._store(keys, session.version, turn.base_version, data)
            if version in (_COMMITTED, _DELETED):
                return None
            if version != _CHANGED:
                return msgspec.structs.replace(changed, version=version)
        raise SessionBusyError

    async def replace(self, tenant: str, session_id: str, session: Session) -> bool:
        """Replace the stored conversation of the same version by ``session``; return False if the
        version differs.
        """
        data = await _encoded(_stored(session))
        keys = [redis_keys.session_key(tenant, session_id)]
        return await self._store(keys, session.version, session.version, data) > 0

    async def delete(self, tenant: str, session_id: str) -> bool:
        """Delete the conversation and the additions of running requests; return whether it
        existed.
        """
        key = redis_keys.session_key(tenant, session_id)
        return bool(await reachable(self._link).evaluate(_DELETE, [key], [self._turn_ttl_ms]))

    async def lock_summary(self, tenant: str, session_id: str, ttl_s: float) -> bool:
        """Lock the conversation for summarising, for ``ttl_s``; return whether the caller got the
        lock.
        """
        key = redis_keys.session_summary_key(tenant, session_id)
        return await reachable(self._link).call("SET", key, 1, "NX", "PX", _ms(ttl_s)) is not None

    async def unlock_summary(self, tenant: str, session_id: str, after_s: float = 0.0) -> None:
        """Release the summary lock after ``after_s``."""
        key = redis_keys.session_summary_key(tenant, session_id)
        await reachable(self._link).call("PEXPIRE", key, _ms(after_s))

    async def _store(self, keys: Sequence[str], expected: int, base: int, data: bytes) -> int:
        answer = await reachable(self._link).evaluate(
            _STORE, keys, [expected, base, data, self._ttl_ms]
        )
        return int(answer)


def _stored(session: Session) -> Session:
    """Return the session without the fields that only a reader sets."""
    return msgspec.structs.replace(session, num_bytes=0, expires_in_s=0.0)


async def _encoded(value: Session | Turn) -> bytes:
    num_characters = sum(len(one.message.content) for one in value.messages)
    return await in_thread_if(
        num_characters > _MAX_INLINE_BYTES,
        lambda: zlib.compress(msgspec.json.encode(value), _COMPRESSION_LEVEL),
    )


def _decode(decoder: msgspec.json.Decoder[_Value], data: bytes) -> tuple[_Value, int]:
    """Decode the output of ``_encoded``; also return the size of its JSON. Raises
    SessionUnreadableError.
    """
    try:
        plain = zlib.decompress(data)
        return decoder.decode(plain), len(plain)
    except (zlib.error, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SessionUnreadableError from error


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1e3))
