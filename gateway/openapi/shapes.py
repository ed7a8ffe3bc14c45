"""Shapes that are written piece by piece elsewhere, for the OpenAPI document; tests hold what is
written against them."""

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
    """``name`` comes first, with empty ``arguments``; then more of these."""

    arguments: str
    name: str | msgspec.UnsetType = msgspec.UNSET


class CustomDelta(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``name`` comes first, with an empty ``input``; then more of this."""

    input: str
    name: str | msgspec.UnsetType = msgspec.UNSET


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``id`` and ``type`` are in the first delta of a call, which is of a ``function`` or of a
    ``custom`` tool."""

    index: int
    function: FunctionDelta | msgspec.UnsetType = msgspec.UNSET
    custom: CustomDelta | msgspec.UnsetType = msgspec.UNSET
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: Literal["function", "custom"] | msgspec.UnsetType = msgspec.UNSET


class MessageDelta(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is added to a message."""

    role: Literal["assistant"] | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: tuple[ToolCallDelta, ...] | msgspec.UnsetType = msgspec.UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``finish_reason`` is null up to the choice's last chunk, which has ``stop_reason``, too."""

    index: int
    delta: MessageDelta
    logprobs: ChoiceLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: TokenIds | msgspec.UnsetType = msgspec.UNSET


class ChatCompletionChunk(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``choices`` is empty in the chunks that carry ``usage``, ``session`` or ``tool_step``."""

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
    """``finish_reason`` is null up to the choice's last chunk, which has ``stop_reason``, too."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | msgspec.UnsetType | None = msgspec.UNSET
    prompt_token_ids: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET
    token_ids: TokenIds | msgspec.UnsetType = msgspec.UNSET


class CompletionChunk(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``choices`` is empty in the chunk that carries ``usage``."""

    id: str
    created: int
    model: str
    object: Literal["text_completion"]
    choices: tuple[CompletionChunkChoice, ...]
    usage: UsageInfo | msgspec.UnsetType | None = msgspec.UNSET
