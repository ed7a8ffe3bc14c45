"""Chats: conversations as a front end shows them, with every version of a turn."""

from __future__ import annotations

from typing import Literal

import msgspec

MAX_TITLE_CHARACTERS = 200


class ChatUpdate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /v1/chats/{id}``: the new contents of a chat in place of ``revision`` (0: a
    new chat).

    ``document`` is a JSON object that only the front end interprets.
    """

    revision: int
    title: str
    document: msgspec.Raw


class ChatInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Chat without its document. ``revision`` grows with each change; ``updated_at`` is the time of
    the last change, UTC epoch in seconds."""

    id: str
    title: str
    revision: int
    updated_at: int
    object: Literal["chat"] = "chat"


class Chat(ChatInfo, frozen=True, kw_only=True):
    """Chat with its document."""

    document: msgspec.Raw


class ChatList(msgspec.Struct, frozen=True, kw_only=True):
    """List of chats, the last changed first."""

    data: tuple[ChatInfo, ...]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False
    object: Literal["list"] = "list"


class ChatDeleted(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a deletion."""

    id: str
    object: Literal["chat.deleted"] = "chat.deleted"
    deleted: bool = True


class ConversationRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /v1/conversations``: a new conversation with at most 20 items."""

    items: tuple[msgspec.Raw, ...] | None = None
    metadata: dict[str, str] | None = None


class ConversationUpdate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /v1/conversations/{id}``: metadata that replaces the current metadata."""

    metadata: dict[str, str] | None


class NewItems(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /v1/conversations/{id}/items``: at most 20 more items."""

    items: tuple[msgspec.Raw, ...]


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """Conversation without its items. ``created_at`` is UTC epoch in seconds."""

    id: str
    created_at: int
    metadata: dict[str, str]
    object: Literal["conversation"] = "conversation"


class ConversationDeleted(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: bool = True
