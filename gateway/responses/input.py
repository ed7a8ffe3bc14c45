"""From the items of a Responses request to a conversation, and from its fields to an ask."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

import msgspec

from millrace.gateway.generation_request import GenerationRequest
from millrace.gateway.request.message_fields import in_words, respelled, words_in_words
from millrace.gateway.request.parsing import parse_chat
from millrace.gateway.transport.decoding import decode
from millrace.schemas.chat.messages import (
    MESSAGE_OF_ROLE,
    CalledFunction,
    EchoedMessage,
    Message,
    MessageToolCall,
    SystemMessage,
    ToolMessage,
)
from millrace.schemas.errors import MillraceError, ParameterError
from millrace.schemas.openai import (
    ChatCompletionRequest,
    FunctionFields,
    FunctionTool,
    GenerationFields,
    JsonSchema,
    JsonSchemaFormat,
    ResponseFormat,
)
from millrace.schemas.responses.items import (
    Content,
    EchoedText,
    FlatFunctionTool,
    FunctionCallItem,
    FunctionCallOutputItem,
    GivenCall,
    GivenCallOutput,
    GivenItem,
    GivenMessage,
    GivenReasoning,
    InputText,
    Item,
    ItemReference,
    MessageItem,
    NamedServerTool,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponsesRequest,
    SchemaFormat,
)

LOGPROBS = "message.output_text.logprobs"
# There is no reasoning that is kept from its client, so none to include.
INCLUDABLE = (LOGPROBS, "reasoning.encrypted_content")
_ROLES = tuple(kind.role for kind in get_args(GivenMessage))

# Fields that are known but not honoured, with the values that ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "access_programs": (None,),
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
# How chat completions, which share the rules, spell what is spelled otherwise here.
_RESPELLED = {
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "messages": "input",
}


_ID_PREFIXES: Mapping[type[Item], str] = {
    MessageItem: "msg",
    ReasoningItem: "rs",
    FunctionCallItem: "fc",
    FunctionCallOutputItem: "fco",
}


class _Head(msgspec.Struct, frozen=True):
    type: str | None = None
    role: Any = None
    id: str | None = None

    @property
    def kind(self) -> str:
        """A message, or a reference to an item, may leave it out."""
        is_reference = self.role is None and self.id is not None
        return self.type or ("item_reference" if is_reference else "message")


_PARAMETERS: msgspec.json.Decoder[dict[str, Any] | None] = msgspec.json.Decoder(
    dict[str, Any] | None
)
_HEAD = msgspec.json.Decoder(_Head)
_DECODERS: Mapping[str, msgspec.json.Decoder[GivenItem]] = {
    "message": msgspec.json.Decoder(GivenMessage),
    "reasoning": msgspec.json.Decoder(GivenReasoning),
    "function_call": msgspec.json.Decoder(GivenCall),
    "function_call_output": msgspec.json.Decoder(GivenCallOutput),
    "item_reference": msgspec.json.Decoder(ItemReference),
}


def check_fields(request: ResponsesRequest) -> None:
    """Raises ParameterError for a field that is not honoured."""
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


def given_items(
    given: str | Sequence[msgspec.Raw], field: str = "input"
) -> tuple[Item | ItemReference, ...]:
    """The items of ``field``; the id of one that has none is empty.

    Raises ParameterError naming the item and its field.
    """
    if isinstance(given, str):
        return (MessageItem(id="", role="user", content=(InputText(given),)),)
    if not given:
        raise ParameterError(field, f"{field} must hold at least one item.")
    return tuple(_item(raw, f"{field}[{i}]") for i, raw in enumerate(given))


def named(items: Sequence[Item], stem: str, earlier: Sequence[Item]) -> tuple[Item, ...]:
    """``items`` with an id each that no other one, or one of ``earlier``, has."""
    taken = {item.id for item in earlier}
    result: list[Item] = []
    for number, item in enumerate(items):
        if not item.id or item.id in taken:
            new_id = f"{_ID_PREFIXES[type(item)]}_{stem}_in{number}"
            item = msgspec.structs.replace(item, id=new_id)
        taken.add(item.id)
        result.append(item)
    return tuple(result)


def messages_of(items: Iterable[Item], instructions: str | None) -> tuple[Message, ...]:
    """The conversation as chat completions take it: an assistant's calls belong to the message
    before them, and what was thought to the message or call behind it. Calls that were cut off are
    left out.

    Raises ParameterError for a result without a call and for a call without a result.
    """
    messages: list[Message] = []
    if instructions is not None:
        messages.append(SystemMessage(content=instructions))
    unanswered: set[str] = set()
    thoughts: str | None = None
    for item in items:
        if isinstance(item, ReasoningItem):
            thoughts = "".join(part.text for part in item.content)
        elif isinstance(item, MessageItem):
            text = "".join(part.text for part in item.content)
            message = MESSAGE_OF_ROLE[item.role](content=text)
            if isinstance(message, EchoedMessage):
                message = msgspec.structs.replace(message, reasoning_content=thoughts)
            messages.append(message)
            thoughts = None
        elif isinstance(item, FunctionCallItem):
            if item.status != "incomplete":
                _add_call(messages, item, thoughts)
                unanswered.add(item.call_id)
                thoughts = None
        elif item.call_id in unanswered:
            unanswered.discard(item.call_id)
            messages.append(ToolMessage(content=item.output, tool_call_id=item.call_id))
        else:
            raise ParameterError(
                "input", f"There is no function_call for the output of {item.call_id!r:.100}."
            )
    if unanswered:
        call_id = min(unanswered)
        raise ParameterError("input", f"There is no output of the call {call_id!r:.100} in input.")
    return tuple(messages)


def generation_request_of(
    request: ResponsesRequest, messages: tuple[Message, ...]
) -> GenerationRequest:
    """Raises ParameterError, in this API's words, for whatever cannot be honoured."""
    if request.use_beam_search:
        raise ParameterError(
            "use_beam_search",
            "use_beam_search goes with chat completions and completions; leave it out.",
        )
    try:
        parsed = parse_chat(_chat_request(request, messages))
    except ParameterError as error:
        raise respelled(error, _RESPELLED) from error
    field = in_words(parsed.grammar_field, _RESPELLED)
    words = words_in_words(parsed.words, _RESPELLED)
    return msgspec.structs.replace(parsed, grammar_field=field, words=words)


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


def _item(raw: msgspec.Raw, where: str) -> Item | ItemReference:
    try:
        kind = decode(_HEAD, bytes(raw)).kind
        given = decode(_decoder_of(kind), bytes(raw))
        return given if isinstance(given, ItemReference) else _normalised(given)
    except ParameterError as error:
        path = f"{where}.{error.param}" if error.param else where
        message = f"role must be {_one_of(_ROLES)}." if error.param == "role" else error.message
        raise ParameterError(path, f"{where}: {message}") from error


def _decoder_of(kind: str) -> msgspec.json.Decoder[GivenItem]:
    decoder = _DECODERS.get(kind)
    if decoder is None:
        raise ParameterError(
            "type", f"items of type {kind!r:.100} are not supported; give {_one_of(_DECODERS)}."
        )
    return decoder


def _normalised(
    given: GivenMessage | GivenReasoning | GivenCall | GivenCallOutput,
) -> Item:
    if getattr(given, "phase", None) is not None:
        raise ParameterError("phase", "phase is not supported; leave it out.")
    status = given.status or "completed"
    if isinstance(given, GivenReasoning):
        content = tuple(ReasoningText(part.text) for part in given.content or ())
        return ReasoningItem(id=given.id or "", content=content, status=status)
    if isinstance(given, GivenCall):
        return FunctionCallItem(
            id=given.id or "",
            call_id=given.call_id,
            name=given.name,
            arguments=given.arguments,
            status=status,
        )
    if isinstance(given, GivenCallOutput):
        output = given.output
        return FunctionCallOutputItem(
            id=given.id or "",
            call_id=given.call_id,
            output=output if isinstance(output, str) else "".join(part.text for part in output),
            status=status,
        )
    return MessageItem(id=given.id or "", role=given.role, content=_content(given), status=status)


def _content(given: GivenMessage) -> tuple[Content, ...]:
    content = given.content
    if isinstance(content, str):
        return (OutputText(content) if given.role == "assistant" else InputText(content),)
    return tuple(
        OutputText(part.text, logprobs=part.logprobs) if isinstance(part, EchoedText) else part
        for part in content
    )


def _one_of(names: Iterable[str]) -> str:
    return "one of " + ", ".join(names)


def _add_call(messages: list[Message], item: FunctionCallItem, thoughts: str | None) -> None:
    call = MessageToolCall(
        id=item.call_id, function=CalledFunction(name=item.name, arguments=item.arguments)
    )
    if messages and isinstance(messages[-1], EchoedMessage) and thoughts is None:
        calls = (*(messages[-1].tool_calls or ()), call)
        messages[-1] = msgspec.structs.replace(messages[-1], tool_calls=calls)
    else:
        messages.append(EchoedMessage(content="", tool_calls=(call,), reasoning_content=thoughts))


def _chat_request(
    request: ResponsesRequest, messages: tuple[Message, ...]
) -> ChatCompletionRequest:
    shared = {name: getattr(request, name) for name in GenerationFields.__struct_fields__}
    tools = request.tools or ()
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
        tools=tuple(
            _nested_tool(tool, f"tools[{i}].parameters")
            for i, tool in enumerate(tools)
            if isinstance(tool, FlatFunctionTool)
        ),
        server_tools=tuple(tool.name for tool in tools if isinstance(tool, NamedServerTool)),
        tool_choice=_nested_choice(request.tool_choice),
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


def _nested_tool(tool: FlatFunctionTool, where: str) -> FunctionTool:
    try:
        parameters = decode(_PARAMETERS, bytes(tool.parameters))
    except MillraceError as error:
        raise ParameterError(where, f"{where}: {error.message}") from error
    return FunctionTool(
        function=FunctionFields(
            name=tool.name,
            description=tool.description,
            parameters=parameters,
            strict=tool.strict,
        )
    )


def _nested_choice(choice: Any) -> Any:
    """A function is named one level deeper in chat completions."""
    if not isinstance(choice, dict):
        return choice
    if set(choice) != {"type", "name"} or choice["type"] != "function":
        raise ParameterError(
            "tool_choice",
            "tool_choice must be auto, none, required or an object with type function and a name.",
        )
    return {"type": "function", "function": {"name": choice["name"]}}
