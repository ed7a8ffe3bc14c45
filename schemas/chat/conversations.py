"""OpenAI's Conversations API: conversations that answers of the Responses API are added to."""

from __future__ import annotations

from typing import Literal

import msgspec


class ConversationRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/conversations``: a new one, of at most 20 items."""

    items: tuple[msgspec.Raw, ...] | None = None
    metadata: dict[str, str] | None = None


class ConversationUpdate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/conversations/{id}``: other metadata, in the place of what it has."""

    metadata: dict[str, str] | None


class NewItems(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/conversations/{id}/items``: at most 20 more items."""

    items: tuple[msgspec.Raw, ...]


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation without its items. ``created_at`` is UTC epoch, in seconds."""

    id: str
    created_at: int
    metadata: dict[str, str]
    object: Literal["conversation"] = "conversation"


class ConversationDeleted(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: bool = True
