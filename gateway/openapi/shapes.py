"""Shapes of streamed chunks for the OpenAPI document; the code writes these chunks piece by piece.
Tests check chunks against these shapes.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from millrace.schemas.chat.completions import ToolStepInfo
from millrace.schemas.openai import (
    ChoiceLogprobs,
    CompletionLogprobs,
    TokenIds,
    UsageInfo,
)
from millrace.schemas.sessions import SessionInfo


class FunctionDelta(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Delta of a function call. ``name`` comes first, with empty ``arguments``; later deltas add to
    ``arguments``.
    """

    arguments: str
    name: str | msgspec.UnsetType = msgspec.UNSET


class CustomDelta(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Delta of a custom tool's call. ``name`` comes first, with an empty ``input``; later deltas
    add to ``input``.
    """

    input: str
    name: str | msgspec.UnsetType = msgspec.UNSET


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Delta of a tool call. ``id`` and ``type`` are in the first delta of a call, which is of a
    ``function`` or of a ``custom`` tool.
    """

    index: int
    function: FunctionDelta | msgspec.UnsetType = msgspec.UNSET
    custom: CustomDelta | msgspec.UnsetType = msgspec.UNSET
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: Literal["function", "custom"] | msgspec.UnsetType = msgspec.UNSET


class MessageDelta(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Addition to a message."""

    role: Literal["assistant"] | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: tuple[ToolCallDelta, ...] | msgspec.UnsetType = msgspec.UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Choice of a chat chunk. ``finish_reason`` is null up to the choice's last chunk, which also
    has ``stop_reason``.
    """

    index: int
    delta: MessageDelta
    logprobs: ChoiceLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: TokenIds | msgspec.UnsetType = msgspec.UNSET


class ChatCompletionChunk(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Chunk of a chat completion. ``choices`` is empty in the chunks that carry ``usage``,
    ``session`` or ``tool_step``.
    """

    id: str
    created: int
    model: str
    object: Literal["chat.completion.chunk"]
    choices: tuple[ChatChunkChoice, ...]
    usage: UsageInfo | msgspec.UnsetType | None = msgspec.UNSET
    session: SessionInfo | msgspec.UnsetType = msgspec.UNSET
    tool_step: ToolStepInfo | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET


class CompletionChunkChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Choice of a completion chunk. ``finish_reason`` is null up to the choice's last chunk, which
    also has ``stop_reason``.
    """

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | msgspec.UnsetType | None = msgspec.UNSET
    prompt_token_ids: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET
    token_ids: TokenIds | msgspec.UnsetType = msgspec.UNSET


class CompletionChunk(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Chunk of a text completion. ``choices`` is empty in the chunk that carries ``usage``."""

    id: str
    created: int
    model: str
    object: Literal["text_completion"]
    choices: tuple[CompletionChunkChoice, ...]
    usage: UsageInfo | msgspec.UnsetType | None = msgspec.UNSET
