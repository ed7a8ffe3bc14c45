"""Conversion of a Messages request to a generation request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from millrace.gateway.messages.history import History, history_of
from millrace.registry.requests.generation_request import GenerationRequest
from millrace.registry.requests.message_fields import (
    in_words,
    refuse_unhonoured,
    respelled,
    words_in_words,
)
from millrace.registry.requests.offered.chat_tools import CUSTOM, unknown_type
from millrace.registry.requests.offered.offered_tools import (
    AskedChoice,
    GivenTool,
    OfferedTools,
    ToolReference,
    offered_tools,
    tool_left_out,
)
from millrace.registry.requests.offered.provider_tools import CLIENT_TOOL_TYPES, client_tool
from millrace.registry.requests.parsing import parse_chat
from millrace.schemas.anthropic.requests import (
    OF_PROVIDER_TOOLS,
    MessagesRequest,
    MessagesTool,
    MessagesToolChoice,
)
from millrace.schemas.chat.messages import EchoedMessage
from millrace.schemas.errors import ParameterError
from millrace.schemas.notices import bounded
from millrace.schemas.openai import (
    ChatCompletionRequest,
    JsonSchema,
    JsonSchemaFormat,
)
from millrace.schemas.tools import ToolDefinition, ToolMode, check_tool_name

# Fields that are known but not honoured, with their neutral values.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {"container": (None,), "mcp_servers": (None, [])}
_TIERS = {"standard_only": "default"}
# Names of fields in chat completions that the Messages API spells otherwise; the rules are shared.
_RESPELLED = {
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "thinking_token_budget": "thinking.budget_tokens",
    "max_completion_tokens": "max_tokens",
    "safety_identifier": "metadata.user_id",
    "stop": "stop_sequences",
}
_MODES = {
    "auto": ToolMode.AUTO,
    "any": ToolMode.REQUIRED,
    "tool": ToolMode.NAMED,
    "none": ToolMode.NONE,
}
_THINKING = ("enabled", "adaptive")


def generation_request_of(request: MessagesRequest) -> GenerationRequest:
    """Convert a request. Raises ParameterError, with this API's field names, for fields that cannot
    be honoured.
    """
    refuse_unhonoured(request, _NEUTRAL, "")
    history = history_of(request)
    try:
        parsed = parse_chat(_chat_request(request, history), _offered(request, history))
    except ParameterError as error:
        raise respelled(error, _RESPELLED) from error
    field = in_words(parsed.grammar_field, _RESPELLED)
    words = words_in_words(parsed.words, _RESPELLED)
    notices = bounded((*parsed.notices, *history.notices))
    return msgspec.structs.replace(parsed, grammar_field=field, words=words, notices=notices)


def _chat_request(request: MessagesRequest, history: History) -> ChatCompletionRequest:
    thinking, output, choice = request.thinking, request.output_config, request.tool_choice
    thinks = thinking is not None and thinking.type in _THINKING
    tier = request.service_tier
    return ChatCompletionRequest(
        model=request.model,
        messages=history.messages,
        max_completion_tokens=request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        stop=request.stop_sequences,
        stream=request.stream,
        parallel_tool_calls=not (choice is not None and choice.disable_parallel_tool_use),
        response_format=_format(output.format.schema) if output and output.format else None,
        reasoning_effort=history.effort or (output.effort if output else None),
        enable_thinking=thinks,
        thinking_token_budget=thinking.budget_tokens if thinking and thinks else None,
        continue_final_message=isinstance(history.messages[-1], EchoedMessage),
        include_reasoning=thinks and thinking is not None and thinking.display != "omitted",
        safety_identifier=None if request.metadata is None else request.metadata.user_id,
        service_tier=None if tier is None else _TIERS.get(tier, tier),
    )


def _offered(request: MessagesRequest, history: History) -> OfferedTools:
    given = [_given(tool, where) for where, tool in history.tools]
    return offered_tools(given, _choice(request.tool_choice))


def _given(tool: MessagesTool, where: str) -> GivenTool:
    tool_type = tool.type or CUSTOM
    description, schema = tool.description or "", tool.input_schema
    if tool_type != CUSTOM:
        left_out = tool_left_out(tool_type, where, tool.name)
        if left_out is not None:
            return left_out
        known = client_tool(tool_type)
        if known is None:
            raise unknown_type(tool_type, where, (CUSTOM, *CLIENT_TOOL_TYPES))
        description, schema = known
    for name in OF_PROVIDER_TOOLS:
        if tool_type == CUSTOM and getattr(tool, name) is not None:
            raise ParameterError(
                f"{where}.{name}", f"{where}.{name} is not a field of a custom tool; leave it out."
            )
    if not tool.name:
        raise ParameterError(f"{where}.name", f"{where}.name is required.")
    check_tool_name(tool.name, f"{where}.name")
    if schema is None:
        raise ParameterError(f"{where}.input_schema", f"{where}.input_schema is required.")
    return GivenTool(
        where=where,
        type=tool_type,
        name=tool.name,
        definition=ToolDefinition(
            name=tool.name,
            description=description,
            parameters=schema,
            strict=bool(tool.strict),
        ),
    )


def _choice(choice: MessagesToolChoice | None) -> AskedChoice:
    if choice is None:
        return AskedChoice()
    if (choice.type == "tool") != (choice.name is not None):
        raise ParameterError(
            "tool_choice.name", "tool_choice.name goes with the type tool, and with no other."
        )
    named = ToolReference(name=choice.name or "")
    return AskedChoice(_MODES[choice.type], named=named)


def _format(schema: dict[str, Any]) -> JsonSchemaFormat:
    raw = msgspec.Raw(msgspec.json.encode(schema))
    return JsonSchemaFormat(JsonSchema(name="output", schema=raw, strict=True))
