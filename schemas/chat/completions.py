"""Answer to a chat completion, in OpenAI's format."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from millrace.schemas.chat.messages import Message, MessageToolCall
from millrace.schemas.notices import NOTICE_NAME, Notices
from millrace.schemas.openai import ChoiceLogprobs, PromptTokens, TokenIds, UsageInfo
from millrace.schemas.sessions import SessionInfo


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Message of the assistant. ``reasoning_content`` and ``reasoning`` both hold the thoughts
    before the answer."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: tuple[MessageToolCall, ...] | msgspec.UnsetType = msgspec.UNSET


class ToolStepInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Run of one of the gateway's own tools. ``output`` is the text given to the model."""

    call_id: str
    name: str
    arguments: str
    ok: bool
    output: str
    duration_ms: float


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Choice of a chat completion. ``stop_reason`` is the stop string or the id of the stop token
    that ended it, if any. ``token_ids`` are present if requested."""

    message: AssistantMessage
    finish_reason: str
    stop_reason: str | int | None = None
    index: int = 0
    logprobs: ChoiceLogprobs | None = None
    token_ids: TokenIds | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a chat completion that is not streamed. ``session`` and ``tool_steps`` are
    Millrace's own fields: how the saved conversation was fitted into the context window, and which
    of its own tools the gateway ran. ``prompt_logprobs`` and ``prompt_token_ids`` are present if
    requested."""

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
    """Body of ``POST /v1/tokenize``: a prompt, or messages rendered by the model's chat template.
    ``add_generation_prompt`` appends the start of an answer. ``continue_final_message`` stops at
    the end of the last message's text."""

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
    """Answer to a tokenization. ``token_strs`` are the tokens as the tokenizer spells them, if
    requested."""

    tokens: tuple[int, ...]
    count: int
    max_model_len: int
    token_strs: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    notices: Notices | msgspec.UnsetType = msgspec.field(name=NOTICE_NAME, default=msgspec.UNSET)


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /v1/detokenize``: token ids to convert to text."""

    model: str
    tokens: tuple[int, ...]
    skip_special_tokens: bool = False


class DetokenizeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    prompt: str
