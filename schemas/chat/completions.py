"""The answer to a chat completion, as OpenAI's clients read it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from millrace.schemas.chat.messages import Message, MessageToolCall
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


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/tokenize``: a prompt, or messages as the model's chat template renders them, with
    what begins an answer if ``add_generation_prompt``, or up to the end of the last message's text
    if ``continue_final_message``."""

    model: str
    prompt: str | None = None
    messages: tuple[Message, ...] | None = None
    tools: tuple[msgspec.Raw, ...] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool | None = None


class TokenizeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """``token_strs`` are the tokens as the tokenizer spells them, if they were asked for."""

    tokens: tuple[int, ...]
    count: int
    max_model_len: int
    token_strs: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    notices: Notices | msgspec.UnsetType = msgspec.field(name=NOTICE_NAME, default=msgspec.UNSET)


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/detokenize``: token ids back to text."""

    model: str
    tokens: tuple[int, ...]
    skip_special_tokens: bool = False


class DetokenizeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    prompt: str
