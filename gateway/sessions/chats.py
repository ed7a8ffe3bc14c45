"""Chats in Redis: documents of front ends, each replaced whole by compare-and-set.

A chat is a hash with ``revision``, ``title``, ``updated_ms`` and ``data`` (compressed JSON). Each
tenant also has the ids of its chats in the order of their last change.
"""

from __future__ import annotations

import asyncio
import re
import zlib

import msgspec

from millrace.bus import redis_keys
from millrace.runtime.clock import Clock
from millrace.runtime.redis.link import RedisLink, Script, reachable
from millrace.runtime.tasks import in_thread_if
from millrace.schemas.chat.chats import Chat, ChatInfo, ChatUpdate
from millrace.schemas.config import GatewayConfig
from millrace.schemas.errors import MillraceError, ParameterError, PayloadTooLargeError

_COMPRESSION_LEVEL = 1
_MAX_INLINE_BYTES = 64 * 1024
_IDS = re.compile(r"[A-Za-z0-9-][A-Za-z0-9_-]{0,63}")
_CHANGED, _FULL = -1, -2

# KEYS: the chat, the tenant's list. ARGV: the expected revision, title, data, now in ms, time to
# live in ms, the maximum number of chats, the id. Returns the new revision, which is greater than
# any revision of a deleted chat with that id.
_PUT = Script(
    """
local revision = tonumber(redis.call('HGET', KEYS[1], 'revision') or '0')
if revision ~= tonumber(ARGV[1]) then return -1 end
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', tonumber(ARGV[4]) - tonumber(ARGV[5]))
if revision == 0 and redis.call('ZCARD', KEYS[2]) >= tonumber(ARGV[6]) then return -2 end
revision = math.max(revision + 1, tonumber(ARGV[4]))
redis.call('HSET', KEYS[1], 'revision', string.format('%.0f', revision), 'title', ARGV[2],
           'data', ARGV[3], 'updated_ms', ARGV[4])
redis.call('PEXPIRE', KEYS[1], ARGV[5])
redis.call('ZADD', KEYS[2], ARGV[4], ARGV[7])
redis.call('PEXPIRE', KEYS[2], ARGV[5])
return revision
"""
)

# KEYS: the tenant's list. ARGV: the oldest time in ms, the id to continue after (empty: from the
# first on), the maximum number. Returns 0 for an unknown id.
_LIST = Script(
    """
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', ARGV[1])
local from = 0
if ARGV[2] ~= '' then
  local rank = redis.call('ZREVRANK', KEYS[1], ARGV[2])
  if not rank then return 0 end
  from = rank + 1
end
return redis.call('ZREVRANGE', KEYS[1], from, from + ARGV[3] - 1)
"""
)

# KEYS: the chat, the tenant's list. ARGV: the id.
_DELETE = Script(
    """
redis.call('ZREM', KEYS[2], ARGV[1])
return redis.call('DEL', KEYS[1])
"""
)


class ChatNotFoundError(MillraceError, code="chat_not_found", http_status=404):
    """Chat id that is unknown for this tenant."""

    param = "chat_id"

    def __init__(self) -> None:
        super().__init__("There is no such chat; it may have expired or been deleted.")


class ChatChangedError(MillraceError, code="chat_changed", http_status=409):
    """Chat that was changed or deleted meanwhile."""

    param = "revision"

    def __init__(self) -> None:
        super().__init__(
            "The chat was changed or deleted meanwhile. Read it again, add your change to what is "
            "there now, and send that with its revision."
        )


class TooManyChatsError(MillraceError, code="too_many_chats", http_status=409):
    """Chat beyond the tenant's limit."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"There are {limit} chats already, which is the limit. Delete some.")


class ChatStore:
    """Store of each tenant's chats, kept for ``chat_ttl_s`` after their last change. Without a
    link, Redis counts as unreachable. All calls raise RedisUnreachableError.
    """

    def __init__(self, link: RedisLink | None, config: GatewayConfig, clock: Clock) -> None:
        self._link = link
        self._clock = clock
        self._ttl_ms = round(config.chat_ttl_s * 1e3)
        self._max_bytes = config.chat_max_bytes
        self._max_chats = config.max_chats

    async def list_newest(self, tenant: str, after: str, num: int) -> tuple[list[ChatInfo], bool]:
        """Return at most ``num`` chats, the last changed first, after the chat ``after`` (empty:
        from the first on), and whether there are more. Raises ParameterError if ``after`` is
        unknown.
        """
        link, key = reachable(self._link), redis_keys.chats_key(tenant)
        oldest_ms = self._now_ms() - self._ttl_ms
        found = await link.evaluate(_LIST, [key], [oldest_ms, after, num + 1])
        if found == 0:
            raise ParameterError("after", "after must be the id of a chat of this list.")
        ids = [chat_id.decode() for chat_id in found]
        fields = ("revision", "title", "updated_ms")
        kept = await asyncio.gather(
            *(link.call("HMGET", redis_keys.chat_key(tenant, one), *fields) for one in ids[:num])
        )
        # A chat may have been deleted since.
        infos = [_info(one, *values) for one, values in zip(ids, kept, strict=False) if values[0]]
        return infos, len(ids) > num

    async def get(self, tenant: str, chat_id: str) -> Chat:
        """Return a chat. Raises ChatNotFoundError."""
        _check_id(chat_id)
        key = redis_keys.chat_key(tenant, chat_id)
        fields = ("revision", "title", "updated_ms", "data")
        *head, data = await reachable(self._link).call("HMGET", key, *fields)
        if data is None:
            raise ChatNotFoundError
        document = await in_thread_if(len(data) > _MAX_INLINE_BYTES, lambda: zlib.decompress(data))
        info = _info(chat_id, *head)
        return Chat(**msgspec.structs.asdict(info), document=msgspec.Raw(document))

    async def put(self, tenant: str, chat_id: str, update: ChatUpdate) -> ChatInfo:
        """Store a chat; return its new state. Raises ChatChangedError if the revision differs from
        the update's, PayloadTooLargeError, TooManyChatsError, and ChatNotFoundError for an invalid
        id.
        """
        _check_id(chat_id)
        document = bytes(update.document)
        if len(document) > self._max_bytes:
            raise PayloadTooLargeError(len(document), self._max_bytes)
        data = await in_thread_if(
            len(document) > _MAX_INLINE_BYTES, lambda: zlib.compress(document, _COMPRESSION_LEVEL)
        )
        now_ms = self._now_ms()
        keys = [redis_keys.chat_key(tenant, chat_id), redis_keys.chats_key(tenant)]
        expected, title = update.revision, update.title
        revision = await reachable(self._link).evaluate(
            _PUT, keys, [expected, title, data, now_ms, self._ttl_ms, self._max_chats, chat_id]
        )
        if revision == _CHANGED:
            raise ChatChangedError
        if revision == _FULL:
            raise TooManyChatsError(self._max_chats)
        return ChatInfo(id=chat_id, title=title, revision=revision, updated_at=now_ms // 1_000)

    async def delete(self, tenant: str, chat_id: str) -> bool:
        """Delete a chat; return whether it existed. Raises ChatNotFoundError for an invalid id."""
        _check_id(chat_id)
        keys = [redis_keys.chat_key(tenant, chat_id), redis_keys.chats_key(tenant)]
        return bool(await reachable(self._link).evaluate(_DELETE, keys, [chat_id]))

    def _now_ms(self) -> int:
        return self._clock.now_ns() // 1_000_000


def _check_id(chat_id: str) -> None:
    if not _IDS.fullmatch(chat_id):
        raise ChatNotFoundError


def _info(chat_id: str, revision: bytes, title: bytes, updated_ms: bytes) -> ChatInfo:
    return ChatInfo(
        id=chat_id,
        title=title.decode(),
        revision=int(revision),
        updated_at=int(updated_ms) // 1_000,
    )
