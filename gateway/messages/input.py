"""From a Messages request to a generation request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from millrace.gateway.generation_request import GenerationRequest
from millrace.gateway.messages.history import History, history_of
from millrace.gateway.request.message_fields import in_words, refuse_unhonoured, respelled
from millrace.gateway.request.parsing import parse_chat
from millrace.schemas.anthropic.requests import (
    MessagesRequest,
    MessagesTool,
    MessagesToolChoice,
)
from millrace.schemas.chat.messages import EchoedMessage
from millrace.schemas.errors import ParameterError
from millrace.schemas.notices import bounded
from millrace.schemas.openai import (
    ChatCompletionRequest,
    FunctionFields,
    FunctionTool,
    JsonSchema,
    JsonSchemaFormat,
)

# Fields that are known but not honoured, with the values that ask for nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {"container": (None,), "mcp_servers": (None, [])}
_TIERS = {"standard_only": "default"}
# How chat completions, which share the rules, spell what is spelled otherwise here.
_RESPELLED = {
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "thinking_token_budget": "thinking.budget_tokens",
    "max_completion_tokens": "max_tokens",
    "safety_identifier": "metadata.user_id",
    "stop": "stop_sequences",
}
_THINKING = ("enabled", "adaptive")


def generation_request_of(request: MessagesRequest) -> GenerationRequest:
    """Raises ParameterError, in this API's words, for whatever cannot be honoured."""
    refuse_unhonoured(request, _NEUTRAL, "")
    history = history_of(request)
    try:
        parsed = parse_chat(_chat_request(request, history))
    except ParameterError as error:
        raise respelled(error, _RESPELLED) from error
    field = in_words(parsed.grammar_field, _RESPELLED)
    notices = bounded((*parsed.notices, *history.notices))
    return msgspec.structs.replace(parsed, grammar_field=field, notices=notices)


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
        tools=tuple(_tool(tool, where) for where, tool in history.tools),
        tool_choice=_choice(choice),
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


def _tool(tool: MessagesTool, where: str) -> FunctionTool:
    if tool.type not in (None, "custom"):
        raise ParameterError(
            f"{where}.type",
            f"{where}.type: only custom tools, which the client runs, are taken, "
            f"not {tool.type!r:.100}.",
        )
    if tool.input_schema is None:
        raise ParameterError(f"{where}.input_schema", f"{where}.input_schema is required.")
    return FunctionTool(
        function=FunctionFields(
            name=tool.name,
            description=tool.description,
            parameters=tool.input_schema,
            strict=tool.strict,
        )
    )


def _choice(choice: MessagesToolChoice | None) -> Any:
    """As chat completions spell it."""
    if choice is None:
        return None
    if (choice.type == "tool") != (choice.name is not None):
        raise ParameterError(
            "tool_choice.name", "tool_choice.name goes with the type tool, and with no other."
        )
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


def _format(schema: dict[str, Any]) -> JsonSchemaFormat:
    raw = msgspec.Raw(msgspec.json.encode(schema))
    return JsonSchemaFormat(JsonSchema(name="output", schema=raw, strict=True))
