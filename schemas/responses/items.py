"""OpenAI's Responses API, as far as it is honoured: requests, items of a conversation, answers.

As in ``schemas.openai``, a field of type Any is known but not honoured: it is taken only when its
value asks for nothing.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from millrace.schemas.chat.unreadable import InputAudio, InputFile, InputImage
from millrace.schemas.notices import NOTICE_NAME, Notices
from millrace.schemas.openai import (
    GenerationFields,
    JsonObjectFormat,
    LogprobInfo,
    TextFormat,
)
from millrace.schemas.responses.call_items import ItemStatus, OtherItem

# --- items: what a conversation is made of ---------------------------------------------------


class _Typed(msgspec.Struct, frozen=True, tag_field="type", forbid_unknown_fields=True):
    pass


class InputText(_Typed, frozen=True, tag="input_text"):
    """Text that was given."""

    text: str


class OutputText(_Typed, frozen=True, tag="output_text"):
    """Text that a model made; ``logprobs`` has an entry for each token if they were asked for."""

    text: str
    annotations: tuple[()] = ()
    logprobs: tuple[LogprobInfo, ...] | None = None


Content = InputText | OutputText


class MessageItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """A turn in words."""

    id: str
    role: str
    content: tuple[Content, ...]
    status: ItemStatus = "completed"


class FunctionCallItem(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"
):
    """A call that a model made; ``arguments`` is JSON as the model wrote it. A function of a
    namespace has its ``namespace``."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus = "completed"
    namespace: str | msgspec.UnsetType = msgspec.UNSET


class FunctionCallOutputItem(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call_output"
):
    """What the call ``call_id`` gave."""

    id: str
    call_id: str
    output: str
    status: ItemStatus = "completed"


class ReasoningText(_Typed, frozen=True, tag="reasoning_text"):
    """Thoughts as the model wrote them."""

    text: str


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """What a model thought before it went on; ``summary`` is always empty. ``encrypted_content``
    is the same thoughts for clients that send nothing else back, if it was asked for."""

    id: str
    content: tuple[ReasoningText, ...]
    summary: tuple[()] = ()
    encrypted_content: str | None = None
    status: ItemStatus = "completed"


Item = MessageItem | ReasoningItem | FunctionCallItem | FunctionCallOutputItem | OtherItem


# --- requests --------------------------------------------------------------------------------


class EchoedText(msgspec.Struct, frozen=True, tag_field="type", tag="output_text"):
    """Text of an earlier answer, sent back; what an SDK added to it is ignored."""

    text: str
    logprobs: tuple[LogprobInfo, ...] | None = None


class EchoedRefusal(msgspec.Struct, frozen=True, tag_field="type", tag="refusal"):
    """The refusal of an earlier answer, sent back. The model reads it as text."""

    refusal: str


class _GivenItem(msgspec.Struct, frozen=True, kw_only=True):
    """``id`` and ``status`` come from items of earlier answers, which may be sent back with what an
    SDK added to them: fields that are not known are ignored, but not in what a user says."""

    id: str | None = None
    status: ItemStatus | None = None


class _GivenMessage(_GivenItem, frozen=True, kw_only=True, tag_field="role"):
    """Its ``type`` may be left out."""

    @property
    def role(self) -> str:
        return str(self.__struct_config__.tag)

    type: Literal["message"] = "message"


class GivenUserMessage(
    _GivenMessage, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="user"
):
    """What a user says."""

    content: str | tuple[InputText | EchoedText, ...]
    phase: Any = None
    internal_chat_message_metadata_passthrough: dict[str, Any] | None = None


class GivenSystemMessage(GivenUserMessage, frozen=True, kw_only=True, tag="system"):
    """Instructions to the model."""


class GivenDeveloperMessage(GivenUserMessage, frozen=True, kw_only=True, tag="developer"):
    """The newer name of a system's message."""


class GivenAnswer(_GivenMessage, frozen=True, kw_only=True, tag="assistant"):
    """A message of an earlier answer; null content is no text."""

    content: (
        str
        | tuple[InputText | EchoedText | EchoedRefusal | InputImage | InputFile | InputAudio, ...]
        | None
    ) = None


GivenMessage = GivenUserMessage | GivenSystemMessage | GivenDeveloperMessage | GivenAnswer


class GivenCall(_GivenItem, frozen=True, kw_only=True):
    """A call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class GivenCallOutput(_GivenItem, frozen=True, kw_only=True):
    """The result of a call; null is no text."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | tuple[InputText | EchoedText | InputImage | InputFile | InputAudio, ...] | None


class GivenReasoningText(msgspec.Struct, frozen=True, kw_only=True):
    """Thoughts of an earlier answer."""

    text: str
    type: Literal["reasoning_text"] = "reasoning_text"


class GivenReasoning(_GivenItem, frozen=True, kw_only=True):
    """What a model thought before the item that follows: its ``content``, or, where a client does
    not keep that, ``encrypted_content`` as an answer of ours had it. A summary says nothing to a
    model."""

    type: Literal["reasoning"]
    content: tuple[GivenReasoningText, ...] | None = None
    summary: tuple[dict[str, Any], ...] | None = None
    encrypted_content: str | None = None


class ItemReference(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An item that is kept of an earlier answer; its ``type`` may be left out."""

    id: str
    type: Literal["item_reference"] | None = None


class GivenAgentMessage(_GivenItem, frozen=True, kw_only=True):
    """What another agent of the client's says; the model reads it as the user's words."""

    type: Literal["agent_message"]
    content: tuple[InputText | EchoedText, ...]
    author: str = ""
    recipient: str = ""


# Given items that a conversation holds in another form.
RewrittenItem = (
    GivenMessage | GivenReasoning | GivenCall | GivenCallOutput | ItemReference | GivenAgentMessage
)
GivenItem = RewrittenItem | OtherItem


class SchemaFormat(_Typed, frozen=True, kw_only=True, tag="json_schema"):
    """An answer in JSON that ``schema`` describes; see ``schemas.openai.JsonSchema``."""

    name: str
    schema: msgspec.Raw
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The form of the answer's text. ``verbosity`` is a hint that changes nothing."""

    format: TextFormat | JsonObjectFormat | SchemaFormat | None = None
    verbosity: str | None = None


class Reasoning(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to think: ``effort`` as the model's chat template knows it. The others are hints, which
    change nothing: thoughts are told as they are."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: Literal["auto", "all_turns", "current_turn"] | None = None


class ResponsesStreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``reasoning_summary_delivery`` is a hint that changes nothing."""

    include_obfuscation: Any = None
    reasoning_summary_delivery: str | None = None


class ConversationReference(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A conversation by its id."""

    id: str


class ResponsesRequest(GenerationFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/responses``.

    ``input`` is text or a list of items. With ``previous_response_id`` it continues that answer's
    conversation, whose ``instructions`` do not count any more. ``truncation`` ``auto`` leaves out
    the oldest items of a conversation that does not fit the context window. ``prompt_cache_key``
    and ``prompt_cache_retention`` are hints that change nothing here, and so is
    ``client_metadata``. ``enable_thinking``,
    ``chat_template_kwargs`` and ``thinking_token_budget`` are those of chat completions.
    ``conversation`` is one that goes before the input, and that input and output are added to. With
    ``background`` the answer is made whether or not anybody waits for it.
    """

    input: str | tuple[msgspec.Raw, ...]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    max_output_tokens: int | None = None
    tools: tuple[msgspec.Raw, ...] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: tuple[str, ...] | None = None
    top_logprobs: int | None = None
    safety_identifier: str | None = None
    access_programs: Any = None
    background: bool | None = None
    context_management: Any = None
    client_metadata: dict[str, Any] | None = None
    conversation: str | ConversationReference | None = None
    image: Any = None
    max_tool_calls: Any = None
    moderation: Any = None
    prompt: Any = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Any = None
    prompt_cache_retention: str | None = None
    reasoning: Reasoning | None = None
    enable_thinking: bool | None = None
    thinking_token_budget: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def conversation_id(self) -> str:
        """Of the conversation that it names; empty: it names none."""
        given = self.conversation
        return given.id if isinstance(given, ConversationReference) else given or ""


# --- answers ---------------------------------------------------------------------------------


class InputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing is ever charged for filling the cache."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one answer, as the worker counted them."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()
    total_tokens: int


class FailureInfo(msgspec.Struct, frozen=True, kw_only=True):
    """``code`` is one of OpenAI's few: server_error, rate_limit_exceeded, invalid_prompt,
    context_length_exceeded."""

    code: str
    message: str


IncompleteReason = Literal["max_output_tokens", "stop"]


class IncompleteDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Why an answer ended before the model was done. ``stop``: within a call, by a string of
    ``stop`` or because the model ended there."""

    reason: IncompleteReason


ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponseAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An answer with what asked for it. ``store`` says whether it can be referred to later,
    ``conversation`` which one it is added to."""

    id: str
    created_at: int
    status: ResponseStatus
    model: str
    output: tuple[Item, ...]
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    service_tier: str
    store: bool
    temperature: float
    text: TextConfig
    tool_choice: Any
    tools: tuple[msgspec.Raw, ...]
    top_logprobs: int
    top_p: float
    truncation: str
    user: str | None
    usage: ResponseUsage | None = None
    error: FailureInfo | None = None
    incomplete_details: IncompleteDetails | None = None
    background: bool = False
    conversation: ConversationReference | None = None
    object: Literal["response"] = "response"
    notices: Notices | msgspec.UnsetType = msgspec.field(name=NOTICE_NAME, default=msgspec.UNSET)


class ResponseDeleted(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class InputTokens(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /v1/responses/input_tokens``."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"
    notices: Notices | msgspec.UnsetType = msgspec.field(name=NOTICE_NAME, default=msgspec.UNSET)


class ItemList(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /v1/responses/{id}/input_items``."""

    data: tuple[Item, ...]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of an answer: the ``response`` as it was sent, and all the items before it; of
    one in the background also the ``request``, without its input, and how many of the items are not
    of that (``num_earlier``)."""

    response: msgspec.Raw
    input: tuple[Item, ...]
    request: ResponsesRequest | None = None
    num_earlier: int = 0
