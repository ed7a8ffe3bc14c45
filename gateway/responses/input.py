"""Conversion of a Responses request: its items to a conversation, its fields to a generation
request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, get_args

import msgspec

from millrace.gateway.responses.history import messages_of
from millrace.gateway.responses.normalised import (
    THOUGHTS,
    left_out_of,
    normalised,
    opened,
    said,
    with_sentences,
)
from millrace.gateway.responses.tools import offered_of_responses
from millrace.registry.requests.decoding import decode
from millrace.registry.requests.generation_request import GenerationRequest
from millrace.registry.requests.message_fields import in_words, respelled, words_in_words
from millrace.registry.requests.parsing import parse_chat
from millrace.schemas.chat.messages import Message
from millrace.schemas.errors import ParameterError
from millrace.schemas.notices import Notice, NoticeCode, Notices, bounded, notice
from millrace.schemas.openai import (
    ChatCompletionRequest,
    GenerationFields,
    JsonSchema,
    JsonSchemaFormat,
    ResponseFormat,
)
from millrace.schemas.responses.call_items import (
    AdditionalToolsItem,
    OtherItem,
)
from millrace.schemas.responses.items import (
    GivenAgentMessage,
    GivenCall,
    GivenCallOutput,
    GivenMessage,
    GivenReasoning,
    Item,
    ItemReference,
    ResponsesRequest,
    RewrittenItem,
    SchemaFormat,
)

LOGPROBS = "message.output_text.logprobs"
# These request fields of other servers' tools; they have no effect here.
_OF_OTHERS = (
    *("web_search_call.action.sources", "web_search_call.results", "file_search_call.results"),
    *("code_interpreter_call.outputs", "computer_call_output.output.image_url"),
)
INCLUDABLE = (LOGPROBS, THOUGHTS, *_OF_OTHERS)
_ROLES = tuple(str(kind.__struct_config__.tag) for kind in get_args(GivenMessage))

# Fields that are known but not honoured, with their neutral values.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "access_programs": (None, {"cyber": "standard"}),
    "context_management": (None, []),
    "image": (None,),
    "max_tool_calls": (None,),
    "moderation": (None,),
    "prompt": (None,),
    "prompt_cache_options": (None,),
}
_INSTEAD = {
    "max_tokens": "give max_output_tokens",
    "session_id": "give previous_response_id",
    "session_keep": "give previous_response_id",
    "n": "one request makes one answer",
    "prompt_logprobs": "ask chat completions for them",
    "truncate_prompt_tokens": "give truncation",
}
# Names of fields in chat completions that the Responses API spells otherwise; the rules are shared.
_RESPELLED = {
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "messages": "input",
}


# Items of other servers' answers without text that a model here can read.
_LEFT_OUT = frozenset(
    {
        *("web_search_call", "file_search_call", "image_generation_call", "code_interpreter_call"),
        *("computer_call", "computer_call_output", "mcp_list_tools", "mcp_call"),
        *("mcp_approval_request", "mcp_approval_response", "program", "program_output"),
        *("compaction", "compaction_summary", "context_compaction", "configuration_update"),
    }
)


class _Head(msgspec.Struct, frozen=True):
    type: str | None = None
    role: Any = None
    id: str | None = None

    @property
    def kind(self) -> str:
        """Return the type of the item. A message, or a reference to an item, may leave it out."""
        is_reference = self.role is None and self.id is not None
        return self.type or ("item_reference" if is_reference else "message")


_HEAD = msgspec.json.Decoder(_Head)
_DECODERS: Mapping[str, msgspec.json.Decoder[RewrittenItem]] = {
    "message": msgspec.json.Decoder(GivenMessage),
    "reasoning": msgspec.json.Decoder(GivenReasoning),
    "function_call": msgspec.json.Decoder(GivenCall),
    "function_call_output": msgspec.json.Decoder(GivenCallOutput),
    "item_reference": msgspec.json.Decoder(ItemReference),
    "agent_message": msgspec.json.Decoder(GivenAgentMessage),
}
# Items that are stored unchanged, without null fields.
_KEPT: Mapping[str, msgspec.json.Decoder[OtherItem]] = {
    kind.__struct_config__.tag: msgspec.json.Decoder(kind) for kind in get_args(OtherItem)
}
_OBJECT: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, Any])


class GivenItems(NamedTuple):
    """Items of a request with their ``paths``, and a notice for each item or part that the model
    does not read. The notices are not yet bounded.
    """

    items: tuple[Item | ItemReference, ...]
    notices: Notices = ()
    paths: tuple[str, ...] = ()


def check_fields(request: ResponsesRequest) -> None:
    """Raise ParameterError for a field that is not honoured."""
    for name, allowed in NEUTRAL.items():
        value = getattr(request, name)
        if isinstance(value, dict):
            value = {key: entry for key, entry in value.items() if entry is not None}
        if not any(_same(value, nothing) for nothing in allowed):
            raise ParameterError(name, f"{name} is not supported; leave it out.")
    for name, instead in _INSTEAD.items():
        value = getattr(request, name)
        if value is not None and not (name == "n" and value == 1):
            raise ParameterError(name, f"{name} is not supported here; {instead}.")
    if request.conversation is not None:
        if not request.conversation_id:
            raise ParameterError("conversation", "conversation must have an id.")
        if request.previous_response_id is not None:
            raise ParameterError(
                "conversation", "Give one of conversation and previous_response_id."
            )
    if request.background and request.store is False:
        raise ParameterError(
            "store", "An answer in the background is always kept; leave store out."
        )
    _check_stream_options(request)
    for name in request.include or ():
        if name not in INCLUDABLE:
            raise ParameterError("include", f"include takes {' and '.join(INCLUDABLE)}.")


def given_items(given: str | Sequence[msgspec.Raw], field: str = "input") -> GivenItems:
    """Return the items of ``field``. An item without an id has an empty id.

    Raises ParameterError naming the item and its field.
    """
    if isinstance(given, str):
        return GivenItems((said(given),), paths=(field,))
    if not given:
        raise ParameterError(field, f"{field} must hold at least one item.")
    items: list[Item | ItemReference] = []
    paths: list[str] = []
    notices: list[Notice] = []
    for i, raw in enumerate(given):
        path = f"{field}[{i}]"
        item, left_out = _item(raw, path)
        notices += left_out
        if item is not None:
            items.append(item)
            paths.append(path)
    if not items:
        raise ParameterError(field, f"{field} has no item that a model here can read.")
    return GivenItems(tuple(items), tuple(notices), tuple(paths))


def generation_request_of(
    request: ResponsesRequest,
    items: Sequence[Item],
    notices: Notices = (),
    paths: Sequence[str] = (),
) -> GenerationRequest:
    """Make the generation request of ``items``. ``notices`` name the ignored content. ``paths`` has
    the fields of the items that the request itself gave: the last ones in ``items``.

    Raises ParameterError, with this API's names of fields, for fields that cannot be honoured.
    """
    places = ("",) * (len(items) - len(paths)) + tuple(paths)
    messages = messages_of(items, request.instructions, places)
    offered = offered_of_responses(request, items, places)
    if request.use_beam_search:
        raise ParameterError(
            "use_beam_search",
            "use_beam_search works with chat and text completions only; leave it out.",
        )
    try:
        parsed = parse_chat(_chat_request(request, messages), offered)
    except ParameterError as error:
        raise respelled(error, _RESPELLED) from error
    field = in_words(parsed.grammar_field, _RESPELLED)
    words = words_in_words(parsed.words, _RESPELLED)
    notices = bounded((*notices, *parsed.notices))
    return msgspec.structs.replace(parsed, grammar_field=field, words=words, notices=notices)


def _same(value: Any, nothing: Any) -> bool:
    return type(value) is type(nothing) and bool(value == nothing)


def _check_stream_options(request: ResponsesRequest) -> None:
    options = request.stream_options
    if options is None:
        return
    if not request.stream:
        raise ParameterError("stream_options", "stream_options goes only with stream: true.")
    if options.include_obfuscation not in (None, False):
        name = "stream_options.include_obfuscation"
        raise ParameterError(name, f"{name} is not supported; leave it out.")


def _item(raw: msgspec.Raw, where: str) -> tuple[Item | ItemReference | None, list[Notice]]:
    """Return an item, or None if it is ignored, and notices of ignored content."""
    try:
        kind = decode(_HEAD, bytes(raw)).kind
        if kind in _LEFT_OUT:
            return None, [notice(NoticeCode.ITEM_LEFT_OUT, where, kind)]
        if kind in _KEPT:
            item = _kept(kind, bytes(raw))
            return with_sentences(item), left_out_of(item, where)
        given = decode(_decoder_of(kind), bytes(raw))
        if isinstance(given, ItemReference):
            return given, []
        if isinstance(given, GivenReasoning) and _is_sealed_elsewhere(given):
            return None, [notice(NoticeCode.ITEM_LEFT_OUT, where, kind)]
        return normalised(given), left_out_of(given, where)
    except ParameterError as error:
        path = f"{where}.{error.param}" if error.param else where
        message = f"role must be {_one_of(_ROLES)}." if error.param == "role" else error.message
        is_named = bool(error.param) and message.startswith(error.param)
        raise ParameterError(path, f"{where}{'.' if is_named else ': '}{message}") from error


def _kept(kind: str, raw: bytes) -> OtherItem:
    fields = {key: value for key, value in decode(_OBJECT, raw).items() if value is not None}
    item = decode(_KEPT[kind], msgspec.json.encode(fields))
    if isinstance(item, AdditionalToolsItem) or item.call_id:
        return item
    if not item.id:
        raise ParameterError("call_id", "call_id is required.")
    return msgspec.structs.replace(item, call_id=item.id)


def _is_sealed_elsewhere(given: GivenReasoning) -> bool:
    """Return whether the item has thoughts that only another server can read."""
    sealed = given.encrypted_content
    return not given.content and bool(sealed) and opened(sealed or "") is None


def _decoder_of(kind: str) -> msgspec.json.Decoder[RewrittenItem]:
    decoder = _DECODERS.get(kind)
    if decoder is None:
        known = _one_of([*_DECODERS, *_KEPT])
        raise ParameterError(
            "type", f"type: items of type {kind!r:.100} are not supported; give {known}."
        )
    return decoder


def _one_of(names: Iterable[str]) -> str:
    return "one of " + ", ".join(names)


def _chat_request(
    request: ResponsesRequest, messages: tuple[Message, ...]
) -> ChatCompletionRequest:
    shared = {name: getattr(request, name) for name in GenerationFields.__struct_fields__}
    num_alternatives = request.top_logprobs or 0
    with_logprobs = LOGPROBS in (request.include or ()) or num_alternatives > 0
    return ChatCompletionRequest(
        **shared,
        messages=messages,
        safety_identifier=request.safety_identifier,
        reasoning_effort=None if request.reasoning is None else request.reasoning.effort,
        enable_thinking=request.enable_thinking,
        thinking_token_budget=request.thinking_token_budget,
        chat_template_kwargs=request.chat_template_kwargs,
        max_completion_tokens=request.max_output_tokens,
        logprobs=True if with_logprobs else None,
        top_logprobs=num_alternatives if with_logprobs else request.top_logprobs,
        response_format=_response_format(request),
        parallel_tool_calls=request.parallel_tool_calls,
    )


def _response_format(request: ResponsesRequest) -> ResponseFormat | None:
    form = None if request.text is None else request.text.format
    if not isinstance(form, SchemaFormat):
        return form
    return JsonSchemaFormat(
        JsonSchema(
            name=form.name, schema=form.schema, description=form.description, strict=form.strict
        )
    )
