"""Answers of Anthropic's Messages API: the whole message, its events, and errors."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from millrace.schemas.notices import NOTICE_NAME, Notices

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class ThinkingTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """How many of the output's tokens the model thought with."""

    thinking_tokens: int


class MessagesUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one answer. Those of the prompt that were found in the prefix cache are
    ``cache_read_input_tokens`` and not among ``input_tokens``."""

    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    output_tokens_details: ThinkingTokensDetails | msgspec.UnsetType = msgspec.UNSET


class _Typed(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    pass


class Text(_Typed, frozen=True, kw_only=True, tag="text"):
    """What the model said."""

    text: str
    citations: None = None


class ThinkingText(_Typed, frozen=True, kw_only=True, tag="thinking"):
    """What the model thought. ``signature`` proves nothing: it is there for clients that will not
    send thoughts without one back."""

    thinking: str
    signature: str


class ToolUse(_Typed, frozen=True, kw_only=True, tag="tool_use"):
    """A call that the model made. If the model's input is not a JSON object, ``input`` has its
    text under ``INVALID_JSON``."""

    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = Text | ThinkingText | ToolUse


class MessageAnswer(_Typed, frozen=True, kw_only=True, tag="message"):
    """An answer that is not streamed, or what a stream begins with."""

    id: str
    model: str
    content: tuple[AnswerBlock, ...]
    usage: MessagesUsage
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    role: Literal["assistant"] = "assistant"
    notices: Notices | msgspec.UnsetType = msgspec.field(name=NOTICE_NAME, default=msgspec.UNSET)


class MessageStart(_Typed, frozen=True, kw_only=True, tag="message_start"):
    """The first event. The usage is what is known by then."""

    message: MessageAnswer


class ContentBlockStart(_Typed, frozen=True, kw_only=True, tag="content_block_start"):
    """A block, of which nothing is there yet."""

    index: int
    content_block: AnswerBlock


class BlockTextDelta(_Typed, frozen=True, kw_only=True, tag="text_delta"):
    """More of what is said."""

    text: str


class ThinkingDelta(_Typed, frozen=True, kw_only=True, tag="thinking_delta"):
    """More of what is thought."""

    thinking: str


class SignatureDelta(_Typed, frozen=True, kw_only=True, tag="signature_delta"):
    """The signature of a block of thoughts."""

    signature: str


class InputJsonDelta(_Typed, frozen=True, kw_only=True, tag="input_json_delta"):
    """More of the JSON of a call's input."""

    partial_json: str


Delta = BlockTextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class ContentBlockDelta(_Typed, frozen=True, kw_only=True, tag="content_block_delta"):
    """More of a block."""

    index: int
    delta: Delta


class ContentBlockStop(_Typed, frozen=True, kw_only=True, tag="content_block_stop"):
    """All of a block is there."""

    index: int


class MessageEnd(msgspec.Struct, frozen=True, kw_only=True):
    """Why the answer ended; ``stop_sequence`` is the one that did it, if one did."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageEnding(_Typed, frozen=True, kw_only=True, tag="message_delta"):
    """The end of an answer that ended well, and what it used."""

    delta: MessageEnd
    usage: MessagesUsage


class MessageStop(_Typed, frozen=True, kw_only=True, tag="message_stop"):
    """The last event of an answer that ended well."""

    notices: Notices | msgspec.UnsetType = msgspec.field(name=NOTICE_NAME, default=msgspec.UNSET)


class MessagesErrorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """``type`` is one of Anthropic's; ``code`` and ``param`` are those of the other APIs here."""

    type: str
    message: str
    code: str
    param: str | None = None


class MessagesError(_Typed, frozen=True, kw_only=True, tag="error"):
    """Why there is no answer, or why a stream goes on no more."""

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
    """``POST /v1/messages/count_tokens``."""

    input_tokens: int
    notices: Notices | msgspec.UnsetType = msgspec.field(name=NOTICE_NAME, default=msgspec.UNSET)


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A model. ``created_at`` is a time of RFC 3339; ``max_input_tokens`` and ``max_tokens`` are
    what the caller may have of the context window, null: it is not known yet. Fields that nothing
    is known of are null."""

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
    """A page of ``GET /v1/models``. ``has_more``: there are more in the direction of the page."""

    data: tuple[ModelInfo, ...]
    has_more: bool
    first_id: str | None
    last_id: str | None
