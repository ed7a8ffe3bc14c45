"""The answer to a chat completion, as OpenAI's clients read it."""

from __future__ import annotations

from typing import Literal

import msgspec

from millrace.schemas.chat.messages import MessageToolCall
from millrace.schemas.notices import NOTICE_NAME, Notices
from millrace.schemas.openai import ChoiceLogprobs, PromptTokens, TokenIds, UsageInfo
from millrace.schemas.sessions import SessionInfo


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True):
    """``reasoning_content`` and ``reasoning`` are both the thoughts before the answer."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: tuple[MessageToolCall, ...] | msgspec.UnsetType = msgspec.UNSET


class ToolStepInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The gateway ran one of its own tools. ``output`` is what the model got."""

    call_id: str
    name: str
    arguments: str
    ok: bool
    output: str
    duration_ms: float


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """``stop_reason`` is the stop string or the id of the stop token that ended it, if one did;
    ``token_ids`` are there if they were asked for."""

    message: AssistantMessage
    finish_reason: str
    stop_reason: str | int | None = None
    index: int = 0
    logprobs: ChoiceLogprobs | None = None
    token_ids: TokenIds | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a chat completion that is not streamed. ``session`` and ``tool_steps`` are
    ours: how the kept conversation was fitted, and which of its own tools the gateway ran.
    ``prompt_logprobs`` and ``prompt_token_ids`` are there if they were asked for."""

    id: str
    created: int
    model: str
    choices: tuple[ChatChoice, ...]
    usage: UsageInfo
    object: Literal["chat.completion"] = "chat.completion"
    service_tier: str | msgspec.UnsetType = msgspec.UNSET
    metadata: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
    session: SessionInfo | msgspec.UnsetType = msgspec.UNSET
    tool_steps: tuple[ToolStepInfo, ...] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptTokens | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET
    notices: Notices | msgspec.UnsetType = msgspec.field(name=NOTICE_NAME, default=msgspec.UNSET)
