"""Conversations in Redis: each one compressed value that is replaced whole, by compare-and-set.

A conversation is a hash with ``version`` (how often it changed), ``data`` (compressed JSON) and
``floor`` (the version at which it was last deleted). What a request adds to it waits under a key of
its own until the request is answered, so that any gateway can add it, and only once.
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
# How long it is tried to add an answer while Redis is unreachable.
COMMIT_TIMEOUT_S = 60.0
_COMMITTED, _DELETED, _CHANGED = -1, -2, -3

# KEYS: the conversation's. ARGV: its new time to live in ms (0: as it is).
_LOAD = Script(
    """
local found = redis.call('HMGET', KEYS[1], 'version', 'data')
if found[2] and tonumber(ARGV[1]) > 0 then redis.call('PEXPIRE', KEYS[1], ARGV[1]) end
return {tonumber(found[1] or '0'), found[2] or '', redis.call('PTTL', KEYS[1])}
"""
)

# KEYS: the conversation's and, maybe, the waiting turn's. ARGV: the version that is expected, the
# one that the change is based on, the new data, time to live in ms. Gives the new version.
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

# KEYS: the conversation's. ARGV: how long in ms its end is remembered, so that requests that are
# still answered do not bring it back.
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
    """A conversation would hold more than is kept."""

    param = "session_id"

    def __init__(self, size: int, limit: int, unit: str) -> None:
        super().__init__(
            f"With this request the session would hold {size} {unit}; the limit is {limit} {unit}. "
            "Start another session, or keep less of this one."
        )


class SessionUnreadableError(MillraceError, code="session_unreadable", http_status=409):
    """What is stored is not a conversation as this version writes it."""

    param = "session_id"

    def __init__(self) -> None:
        super().__init__("The stored session cannot be read. Delete it, or use another one.")


class SessionBusyError(MillraceError, code="session_busy", http_status=503, retryable=True):
    """Too many others changed the conversation at the same time."""

    def __init__(self) -> None:
        super().__init__("Too many requests change this session at once. Try again in a moment.")


class Session(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A conversation. ``messages`` follow on the ``num_summarised`` that ``summary`` stands for.

    ``turn_version`` is the version that the newest turn made; ``num_bytes`` the size of its JSON as
    it was read, ``expires_in_s`` when it is forgotten.
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
        """With those that were summarised."""
        return self.num_summarised + len(self.messages)

    @property
    def least_keep(self) -> int:
        """How many messages, of all that there were, cannot be told apart any more: those that were
        summarised and the system messages that stayed in front of what followed."""
        if not self.num_summarised:
            return 0
        return self.num_summarised + num_leading(one.message for one in self.messages)

    def cut(self, keep: int | None) -> Session:
        """Only the first ``keep`` messages of all that there were (None: all of them): none, or at
        least ``least_keep``."""
        if keep is None:
            return self
        if keep == 0:
            return msgspec.structs.replace(self, messages=(), summary="", num_summarised=0)
        assert keep >= self.least_keep
        kept = self.messages[: keep - self.num_summarised]
        return msgspec.structs.replace(self, messages=kept)


class Turn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is added to a conversation as it was at ``base_version``, of which the first ``keep``
    messages stay (None: all). ``model``, its window, and the caller's ``tier`` are the request's.
    """

    base_version: int = 0
    keep: int | None = None
    messages: tuple[Counted, ...] = ()
    model: str = ""
    window_tokens: int = 0
    tier: Tier = Tier.FREE

    def added_to(self, session: Session) -> Session:
        """``session`` with the turn. If others were first, it goes behind theirs, and nothing is
        forgotten."""
        is_base = session.turn_version <= self.base_version <= session.version
        # It may have been summarised since.
        can_cut = not self.keep or self.keep >= session.least_keep
        cut = session.cut(self.keep if is_base and can_cut else None)
        history, turn = continue_with(cut.messages, self.messages)
        return msgspec.structs.replace(cut, messages=(*history, *turn))


_SESSIONS = msgspec.json.Decoder(Session)
_TURNS = msgspec.json.Decoder(Turn)


class SessionStore:
    """The only one to read and write conversations. Without a link Redis counts as unreachable.

    All calls raise RedisUnreachableError; what a call that raised has changed is not known.
    """

    def __init__(self, link: RedisLink | None, config: GatewayConfig, clock: Clock) -> None:
        self._link = link
        self._config = config
        self._clock = clock
        self._ttl_ms = _ms(config.session_ttl_s)
        # A turn waits as long as its request may run and its answer may be added late.
        self._turn_ttl_ms = _ms(config.request_timeout_s + COMMIT_TIMEOUT_S + _MARGIN_S)

    async def load(self, tenant: str, session_id: str, *, renew: bool = False) -> Session:
        """The conversation, an empty one if there is none; ``renew`` starts its time to live
        again. Raises SessionUnreadableError."""
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
        """Raises SessionTooLargeError if the conversation has no room for what a request adds."""
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
        """Keep what a request adds until it is answered."""
        key = redis_keys.session_turn_key(tenant, session_id, request_id)
        data = await _encoded(turn)
        await reachable(self._link).call("SET", key, data, "PX", self._turn_ttl_ms)

    async def drop_turn(self, tenant: str, session_id: str, request_id: str) -> None:
        """The request was refused: it adds nothing."""
        await reachable(self._link).call(
            "DEL", redis_keys.session_turn_key(tenant, session_id, request_id)
        )

    async def turn(self, tenant: str, session_id: str, request_id: str) -> Turn | None:
        """What a request adds; None if that was done, or its time is over. Raises
        SessionUnreadableError."""
        data = await reachable(self._link).call(
            "GET", redis_keys.session_turn_key(tenant, session_id, request_id)
        )
        return None if data is None else _decode(_TURNS, data)[0]

    async def append(
        self, tenant: str, session_id: str, turn: Turn, request_id: str = ""
    ) -> Session | None:
        """The conversation with the turn in it; None if it was deleted since the turn's base, or
        if ``request_id`` is given and what that request adds was added before, by anybody.

        Raises SessionBusyError, SessionUnreadableError, and SessionTooLargeError if others that
        came with this one have filled it.
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
                # Requests at the same time all found room: what they add may pass the bounds once.
                self._check_size(len(session.messages), session.num_bytes)
            data = await _encoded(_stored(changed))
            version = await self._store(keys, session.version, turn.base_version, data)
            if version in (_COMMITTED, _DELETED):
                return None
            if version != _CHANGED:
                return msgspec.structs.replace(changed, version=version)
        raise SessionBusyError

    async def replace(self, tenant: str, session_id: str, session: Session) -> bool:
        """Put ``session`` in the place of what has its version; False if that is not there."""
        data = await _encoded(_stored(session))
        keys = [redis_keys.session_key(tenant, session_id)]
        return await self._store(keys, session.version, session.version, data) > 0

    async def delete(self, tenant: str, session_id: str) -> bool:
        """Forget the conversation and what running requests would add to it; whether there was
        one."""
        key = redis_keys.session_key(tenant, session_id)
        return bool(await reachable(self._link).evaluate(_DELETE, [key], [self._turn_ttl_ms]))

    async def lock_summary(self, tenant: str, session_id: str, ttl_s: float) -> bool:
        """Whether the caller is the one to summarise the conversation, for ``ttl_s``."""
        key = redis_keys.session_summary_key(tenant, session_id)
        return await reachable(self._link).call("SET", key, 1, "NX", "PX", _ms(ttl_s)) is not None

    async def unlock_summary(self, tenant: str, session_id: str, after_s: float = 0.0) -> None:
        """Let the next one summarise, not before ``after_s``."""
        key = redis_keys.session_summary_key(tenant, session_id)
        await reachable(self._link).call("PEXPIRE", key, _ms(after_s))

    async def _store(self, keys: Sequence[str], expected: int, base: int, data: bytes) -> int:
        answer = await reachable(self._link).evaluate(
            _STORE, keys, [expected, base, data, self._ttl_ms]
        )
        return int(answer)


def _stored(session: Session) -> Session:
    """Without what only a reader knows."""
    return msgspec.structs.replace(session, num_bytes=0, expires_in_s=0.0)


async def _encoded(value: Session | Turn) -> bytes:
    num_characters = sum(len(one.message.content) for one in value.messages)
    return await in_thread_if(
        num_characters > _MAX_INLINE_BYTES,
        lambda: zlib.compress(msgspec.json.encode(value), _COMPRESSION_LEVEL),
    )


def _decode(decoder: msgspec.json.Decoder[_Value], data: bytes) -> tuple[_Value, int]:
    """What ``_encoded`` gave, and the size of its JSON. Raises SessionUnreadableError."""
    try:
        plain = zlib.decompress(data)
        return decoder.decode(plain), len(plain)
    except (zlib.error, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SessionUnreadableError from error


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1e3))
