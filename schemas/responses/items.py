"""OpenAI's Responses API, the supported part: requests, items of a conversation, answers.

As in ``schemas.openai``, a field of type Any is known but not supported: it is accepted only if its
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

# --- items of a conversation -----------------------------------------------------------------


class _Typed(msgspec.Struct, frozen=True, tag_field="type", forbid_unknown_fields=True):
    pass


class InputText(_Typed, frozen=True, tag="input_text"):
    """Text from the client."""

    text: str


class OutputText(_Typed, frozen=True, tag="output_text"):
    """Text from a model; ``logprobs`` has an entry for each token if requested."""

    text: str
    annotations: tuple[()] = ()
    logprobs: tuple[LogprobInfo, ...] | None = None


Content = InputText | OutputText


class MessageItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """Turn in words."""

    id: str
    role: str
    content: tuple[Content, ...]
    status: ItemStatus = "completed"


class FunctionCallItem(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"
):
    """Call by a model; ``arguments`` is JSON as the model wrote it. A function of a namespace has
    its ``namespace``."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus = "completed"
    namespace: str | msgspec.UnsetType = msgspec.UNSET


class FunctionCallOutputItem(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call_output"
):
    """Output of the call ``call_id``."""

    id: str
    call_id: str
    output: str
    status: ItemStatus = "completed"


class ReasoningText(_Typed, frozen=True, tag="reasoning_text"):
    """Thoughts as the model wrote them."""

    text: str


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """Thoughts of a model before its next item; ``summary`` is always empty. ``encrypted_content``,
    if requested, has the same thoughts for clients that send back nothing else."""

    id: str
    content: tuple[ReasoningText, ...]
    summary: tuple[()] = ()
    encrypted_content: str | None = None
    status: ItemStatus = "completed"


Item = MessageItem | ReasoningItem | FunctionCallItem | FunctionCallOutputItem | OtherItem


# --- requests --------------------------------------------------------------------------------


class EchoedText(msgspec.Struct, frozen=True, tag_field="type", tag="output_text"):
    """Text of an earlier answer, sent back; fields added by an SDK are ignored."""

    text: str
    logprobs: tuple[LogprobInfo, ...] | None = None


class EchoedRefusal(msgspec.Struct, frozen=True, tag_field="type", tag="refusal"):
    """Refusal of an earlier answer, sent back. The model reads it as text."""

    refusal: str


class _GivenItem(msgspec.Struct, frozen=True, kw_only=True):
    """Item from the client. ``id`` and ``status`` come from items of earlier answers, which may
    have fields added by an SDK: unknown fields are ignored, except in user messages."""

    id: str | None = None
    status: ItemStatus | None = None


class _GivenMessage(_GivenItem, frozen=True, kw_only=True, tag_field="role"):
    """Message from the client. Its ``type`` may be left out."""

    @property
    def role(self) -> str:
        return str(self.__struct_config__.tag)

    type: Literal["message"] = "message"


class GivenUserMessage(
    _GivenMessage, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="user"
):
    """Message of the user."""

    content: str | tuple[InputText | EchoedText, ...]
    phase: Any = None
    internal_chat_message_metadata_passthrough: dict[str, Any] | None = None


class GivenSystemMessage(GivenUserMessage, frozen=True, kw_only=True, tag="system"):
    """Instructions to the model."""


class GivenDeveloperMessage(GivenUserMessage, frozen=True, kw_only=True, tag="developer"):
    """Newer name of a system message."""


class GivenAnswer(_GivenMessage, frozen=True, kw_only=True, tag="assistant"):
    """Message of an earlier answer; null content is empty text."""

    content: (
        str
        | tuple[InputText | EchoedText | EchoedRefusal | InputImage | InputFile | InputAudio, ...]
        | None
    ) = None


GivenMessage = GivenUserMessage | GivenSystemMessage | GivenDeveloperMessage | GivenAnswer


class GivenCall(_GivenItem, frozen=True, kw_only=True):
    """Call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class GivenCallOutput(_GivenItem, frozen=True, kw_only=True):
    """Result of a call; null is empty text."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | tuple[InputText | EchoedText | InputImage | InputFile | InputAudio, ...] | None


class GivenReasoningText(msgspec.Struct, frozen=True, kw_only=True):
    """Thoughts of an earlier answer."""

    text: str
    type: Literal["reasoning_text"] = "reasoning_text"


class GivenReasoning(_GivenItem, frozen=True, kw_only=True):
    """Thoughts of a model before the next item: its ``content``, or ``encrypted_content`` of an
    answer if the client does not keep the content. The model does not see a summary."""

    type: Literal["reasoning"]
    content: tuple[GivenReasoningText, ...] | None = None
    summary: tuple[dict[str, Any], ...] | None = None
    encrypted_content: str | None = None


class ItemReference(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Reference to a saved item of an earlier answer; its ``type`` may be left out."""

    id: str
    type: Literal["item_reference"] | None = None


class GivenAgentMessage(_GivenItem, frozen=True, kw_only=True):
    """Message of another agent of the client; the model reads it as a user message."""

    type: Literal["agent_message"]
    content: tuple[InputText | EchoedText, ...]
    author: str = ""
    recipient: str = ""


# Items from the client that a conversation stores in another form.
RewrittenItem = (
    GivenMessage | GivenReasoning | GivenCall | GivenCallOutput | ItemReference | GivenAgentMessage
)
GivenItem = RewrittenItem | OtherItem


class SchemaFormat(_Typed, frozen=True, kw_only=True, tag="json_schema"):
    """Answer in JSON that matches ``schema``; see ``schemas.openai.JsonSchema``."""

    name: str
    schema: msgspec.Raw
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Form of the answer's text. ``verbosity`` is a hint without effect."""

    format: TextFormat | JsonObjectFormat | SchemaFormat | None = None
    verbosity: str | None = None


class Reasoning(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Reasoning options. ``effort`` is passed to the model's chat template. The other fields are
    hints without effect: thoughts are returned unchanged."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: Literal["auto", "all_turns", "current_turn"] | None = None


class ResponsesStreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a stream. ``reasoning_summary_delivery`` is a hint without effect."""

    include_obfuscation: Any = None
    reasoning_summary_delivery: str | None = None


class ConversationReference(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Reference to a conversation by its id."""

    id: str


class ResponsesRequest(GenerationFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /v1/responses``.

    ``input`` is text or a list of items. ``previous_response_id`` continues that answer's
    conversation, without its ``instructions``. ``truncation`` ``auto`` leaves out the oldest items
    of a conversation that does not fit the context window. ``prompt_cache_key``,
    ``prompt_cache_retention`` and ``client_metadata`` are hints without effect.
    ``enable_thinking``, ``chat_template_kwargs`` and ``thinking_token_budget`` are those of chat
    completions. ``conversation`` precedes the input, and input and output are added to it. With
    ``background`` the answer is completed even without a waiting client.
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
        """Id of the request's conversation; empty: none."""
        given = self.conversation
        return given.id if isinstance(given, ConversationReference) else given or ""


# --- answers ---------------------------------------------------------------------------------


class InputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Details of the input's tokens. Cache writes are never charged."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of one answer, from the worker."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()
    total_tokens: int


class FailureInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Error of a failed answer. ``code`` is one of OpenAI's codes: server_error,
    rate_limit_exceeded, invalid_prompt, context_length_exceeded."""

    code: str
    message: str


IncompleteReason = Literal["max_output_tokens", "stop"]


class IncompleteDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Reason of an early end. ``stop``: the answer ended within a call, by a string of ``stop`` or
    because the model ended there."""

    reason: IncompleteReason


ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponseAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer with the fields of its request. ``store``: later requests can refer to it.
    ``conversation``: the conversation that it is added to."""

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
    """Answer of ``POST /v1/responses/input_tokens``."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"
    notices: Notices | msgspec.UnsetType = msgspec.field(name=NOTICE_NAME, default=msgspec.UNSET)


class ItemList(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of ``GET /v1/responses/{id}/input_items``."""

    data: tuple[Item, ...]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Stored answer: the ``response`` as sent, and all items before it. For a background answer it
    also has the ``request`` without its input, and ``num_earlier``, the number of items that are
    not part of that request."""

    response: msgspec.Raw
    input: tuple[Item, ...]
    request: ResponsesRequest | None = None
    num_earlier: int = 0
