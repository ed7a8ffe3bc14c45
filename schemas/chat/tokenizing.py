"""Text and messages to token ids, and back."""

from __future__ import annotations

from typing import Any

import msgspec

from millrace.schemas.chat.messages import Message
from millrace.schemas.notices import NOTICE_NAME, Notices


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
