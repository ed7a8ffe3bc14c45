"""Answers of Anthropic's Messages API: the whole message, its events, and errors."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from millrace.schemas.notices import NOTICE_NAME, Notices

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class ThinkingTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Number of the output's tokens that are thoughts."""

    thinking_tokens: int


class MessagesUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one answer. ``cache_read_input_tokens`` counts the prompt tokens found in the
    prefix cache; ``input_tokens`` does not include them."""

    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    output_tokens_details: ThinkingTokensDetails | msgspec.UnsetType = msgspec.UNSET


class _Typed(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    pass


class Text(_Typed, frozen=True, kw_only=True, tag="text"):
    """Text block of an answer."""

    text: str
    citations: None = None


class ThinkingText(_Typed, frozen=True, kw_only=True, tag="thinking"):
    """Thinking block of an answer. ``signature`` proves nothing: it exists for clients that refuse
    to send a thinking block back without one."""

    thinking: str
    signature: str


class ToolUse(_Typed, frozen=True, kw_only=True, tag="tool_use"):
    """Tool call by the model. If the model's input is not a JSON object, ``input`` has its text
    under ``INVALID_JSON``."""

    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = Text | ThinkingText | ToolUse


class MessageAnswer(_Typed, frozen=True, kw_only=True, tag="message"):
    """Answer that is not streamed, or the start of a stream."""

    id: str
    model: str
    content: tuple[AnswerBlock, ...]
    usage: MessagesUsage
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    role: Literal["assistant"] = "assistant"
    notices: Notices | msgspec.UnsetType = msgspec.field(name=NOTICE_NAME, default=msgspec.UNSET)


class MessageStart(_Typed, frozen=True, kw_only=True, tag="message_start"):
    """First event of a stream. ``usage`` holds the counts known at that time."""

    message: MessageAnswer


class ContentBlockStart(_Typed, frozen=True, kw_only=True, tag="content_block_start"):
    """Start of a content block, without content."""

    index: int
    content_block: AnswerBlock


class BlockTextDelta(_Typed, frozen=True, kw_only=True, tag="text_delta"):
    """Next piece of the answer's text."""

    text: str


class ThinkingDelta(_Typed, frozen=True, kw_only=True, tag="thinking_delta"):
    """Next piece of the thoughts."""

    thinking: str


class SignatureDelta(_Typed, frozen=True, kw_only=True, tag="signature_delta"):
    """Signature of a thinking block."""

    signature: str


class InputJsonDelta(_Typed, frozen=True, kw_only=True, tag="input_json_delta"):
    """Next piece of a tool call's input, as JSON text."""

    partial_json: str


Delta = BlockTextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class ContentBlockDelta(_Typed, frozen=True, kw_only=True, tag="content_block_delta"):
    """Next piece of a content block."""

    index: int
    delta: Delta


class ContentBlockStop(_Typed, frozen=True, kw_only=True, tag="content_block_stop"):
    """End of a content block."""

    index: int


class MessageEnd(msgspec.Struct, frozen=True, kw_only=True):
    """Stop reason of an answer. ``stop_sequence`` is the stop string that ended it, if any."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageEnding(_Typed, frozen=True, kw_only=True, tag="message_delta"):
    """End of a successful answer, with its usage."""

    delta: MessageEnd
    usage: MessagesUsage


class MessageStop(_Typed, frozen=True, kw_only=True, tag="message_stop"):
    """Last event of a successful answer."""

    notices: Notices | msgspec.UnsetType = msgspec.field(name=NOTICE_NAME, default=msgspec.UNSET)


class MessagesErrorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Error of the Messages API. ``type`` is one of Anthropic's error types; ``code`` and ``param``
    are the same as in Millrace's other APIs."""

    type: str
    message: str
    code: str
    param: str | None = None


class MessagesError(_Typed, frozen=True, kw_only=True, tag="error"):
    """Error in place of an answer, or in the middle of a stream."""

    error: MessagesErrorInfo


MessageEvent = (
    MessageStart
    | ContentBlockStart
    | ContentBlockDelta
    | ContentBlockStop
    | MessageEnding
    | MessageStop
    | MessagesError
)


class TokenCount(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of ``POST /v1/messages/count_tokens``."""

    input_tokens: int
    notices: Notices | msgspec.UnsetType = msgspec.field(name=NOTICE_NAME, default=msgspec.UNSET)


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Model card. ``created_at`` is an RFC 3339 time. ``max_input_tokens`` and ``max_tokens`` are
    the caller's share of the context window, null while it is unknown. Fields without a known value
    are null."""

    id: str
    display_name: str
    created_at: str
    max_input_tokens: int | None
    max_tokens: int | None
    type: Literal["model"] = "model"
    lifecycle: Literal["active"] = "active"
    capabilities: None = None
    deprecated_at: None = None
    line: None = None
    retires_at: None = None


class ModelPage(msgspec.Struct, frozen=True, kw_only=True):
    """Page of ``GET /v1/models``. ``has_more``: further pages exist in the same direction."""

    data: tuple[ModelInfo, ...]
    has_more: bool
    first_id: str | None
    last_id: str | None
