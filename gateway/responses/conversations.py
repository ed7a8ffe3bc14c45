"""Conversations in Redis, to which answers are added."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from millrace.bus import redis_keys
from millrace.gateway.responses.store import MAX_INLINE_BYTES, insist
from millrace.runtime.redis.link import RedisLink, Script, reachable
from millrace.runtime.redis.wire import Argument
from millrace.runtime.tasks import in_thread_if
from millrace.schemas.chat.chats import Conversation
from millrace.schemas.config import GatewayConfig
from millrace.schemas.errors import MillraceError, PayloadTooLargeError
from millrace.schemas.jobs import MAX_NAME_CHARACTERS
from millrace.schemas.responses.items import Item

_HEAD = b"head"
_ITEM = b"i:"
# KEYS: the conversation. ARGV: its time to live in seconds, the id of the addition (empty: it is
# never repeated), and the items.
_APPEND = Script(
    """
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
if ARGV[2] ~= '' and redis.call('HSETNX', KEYS[1], 'm:' .. ARGV[2], 1) == 0 then return 1 end
for i = 3, #ARGV do
  local number = redis.call('HINCRBY', KEYS[1], 'next', 1)
  redis.call('HSET', KEYS[1], 'i:' .. string.format('%012d', number), ARGV[i])
end
redis.call('EXPIRE', KEYS[1], ARGV[1])
return 1
"""
)
# KEYS: the conversation. ARGV: its time to live in seconds, its head, and 1 if it is new, else 0.
_PUT = Script(
    """
if ARGV[3] == '0' and redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
redis.call('HSET', KEYS[1], 'head', ARGV[2])
redis.call('EXPIRE', KEYS[1], ARGV[1])
return 1
"""
)

_encode = msgspec.json.encode
_decode_head = msgspec.json.Decoder(Conversation).decode
_decode_item = msgspec.json.Decoder(Item).decode


class ConversationNotFoundError(MillraceError, code="conversation_not_found", http_status=404):
    """Conversation id that is unknown for this tenant."""

    param = "conversation"

    def __init__(self, conversation_id: str) -> None:
        super().__init__(
            f"There is no conversation {conversation_id!r:.100}: it was deleted or expired."
        )


class KeptConversation(NamedTuple):
    """Stored conversation; ``fields`` has the Redis field of each item."""

    head: Conversation
    items: tuple[Item, ...]
    fields: tuple[bytes, ...]


class ConversationStore:
    """Store of each tenant's conversations, kept for ``conversation_ttl_s`` after their last
    change. Without a link, Redis counts as unreachable. All calls raise RedisUnreachableError.
    """

    def __init__(self, link: RedisLink | None, config: GatewayConfig) -> None:
        self._link = link
        self._ttl_s = round(config.conversation_ttl_s)
        self._max_bytes = config.response_max_bytes

    async def create(self, tenant: str, head: Conversation) -> None:
        """Store a new conversation without items."""
        await self._put(tenant, head, is_new=True)

    async def get(self, tenant: str, conversation_id: str) -> KeptConversation:
        """Return a conversation. Raises ConversationNotFoundError."""
        link = reachable(self._link)
        if len(conversation_id) > MAX_NAME_CHARACTERS:
            raise ConversationNotFoundError(conversation_id)
        kept: dict[bytes, bytes] = await link.call("HGETALL", _key(tenant, conversation_id))
        if _HEAD not in kept:
            raise ConversationNotFoundError(conversation_id)
        fields = tuple(sorted(field for field in kept if field.startswith(_ITEM)))
        num_bytes = sum(map(len, kept.values()))
        items = await in_thread_if(
            num_bytes > MAX_INLINE_BYTES,
            lambda: tuple(_decode_item(kept[field]) for field in fields),
        )
        return KeptConversation(_decode_head(kept[_HEAD]), items, fields)

    def check_room(self, items: Sequence[Item]) -> None:
        """Raise PayloadTooLargeError for more items than a conversation may have."""
        num_bytes = len(_encode(items))
        if num_bytes > self._max_bytes:
            raise PayloadTooLargeError(num_bytes, self._max_bytes)

    async def append(
        self, tenant: str, conversation_id: str, items: Sequence[Item], added_by: str = ""
    ) -> None:
        """Append items, unless ``added_by`` has appended them before. Raises
        ConversationNotFoundError.
        """
        link, key = reachable(self._link), _key(tenant, conversation_id)
        arguments: list[Argument] = [self._ttl_s, added_by, *map(_encode, items)]
        if not await insist(lambda: link.evaluate(_APPEND, [key], arguments)):
            raise ConversationNotFoundError(conversation_id)

    async def update(self, tenant: str, head: Conversation) -> None:
        """Replace the head of a conversation. Raises ConversationNotFoundError."""
        if not await self._put(tenant, head, is_new=False):
            raise ConversationNotFoundError(head.id)

    async def delete(self, tenant: str, conversation_id: str) -> bool:
        """Delete a conversation; return whether it existed."""
        link = reachable(self._link)
        if len(conversation_id) > MAX_NAME_CHARACTERS:
            return False
        return bool(await link.call("DEL", _key(tenant, conversation_id)))

    async def delete_item(self, tenant: str, conversation_id: str, field: bytes) -> None:
        """Delete the item of a field in ``KeptConversation.fields``."""
        await reachable(self._link).call("HDEL", _key(tenant, conversation_id), field)

    async def _put(self, tenant: str, head: Conversation, *, is_new: bool) -> bool:
        """Store the head; return whether the conversation exists now."""
        link, key = reachable(self._link), _key(tenant, head.id)
        arguments = (self._ttl_s, _encode(head), int(is_new))
        return bool(await insist(lambda: link.evaluate(_PUT, [key], arguments)))


def _key(tenant: str, conversation_id: str) -> str:
    return redis_keys.conversation_key(tenant, conversation_id)
