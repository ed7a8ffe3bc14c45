"""From a Messages request to a generation request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import msgspec

from millrace.gateway.generation_request import GenerationRequest
from millrace.gateway.request.message_fields import (
    in_words,
    refuse_unhonoured,
    respelled,
    words_in_words,
)
from millrace.gateway.request.parsing import parse_chat
from millrace.schemas.anthropic.requests import (
    ContentBlock,
    GivenMessage,
    MessagesRequest,
    MessagesTool,
    MessagesToolChoice,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from millrace.schemas.chat.messages import (
    CalledFunction,
    EchoedMessage,
    Message,
    MessageToolCall,
    SystemMessage,
    ToolMessage,
    UserMessage,
)
from millrace.schemas.errors import ParameterError
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
_ALLOWED = {
    "user": (TextBlock, ToolResultBlock),
    "assistant": (TextBlock, ToolUseBlock, ThinkingBlock),
    "system": (TextBlock,),
}

_Blocks = list[tuple[str, ContentBlock]]


def generation_request_of(request: MessagesRequest) -> GenerationRequest:
    """Raises ParameterError, in this API's words, for whatever cannot be honoured."""
    refuse_unhonoured(request, _NEUTRAL, "")
    messages = messages_of(request)
    try:
        parsed = parse_chat(_chat_request(request, messages))
    except ParameterError as error:
        raise respelled(error, _RESPELLED) from error
    field = in_words(parsed.grammar_field, _RESPELLED)
    words = words_in_words(parsed.words, _RESPELLED)
    return msgspec.structs.replace(parsed, grammar_field=field, words=words)


def messages_of(request: MessagesRequest) -> tuple[Message, ...]:
    """The conversation as chat completions take it. Turns of one role that follow one another are
    one; results of tools are messages of their own, before what the user says beside them. A last
    turn of the assistant's is one that the answer goes on with.

    Raises ParameterError for a block that is not its role's, for a result without a call and for a
    call without a result.
    """
    if not request.messages:
        raise ParameterError("messages", "messages must hold at least one message.")
    messages: list[Message] = []
    if request.system:
        messages.append(SystemMessage(content=request.system))
    unanswered: dict[str, str] = {}
    for role, turns in groupby(_numbered(request.messages), lambda one: one[1].role):
        blocks = [block for where, turn in turns for block in _blocks(where, turn)]
        if role == "user":
            messages += _of_user(blocks, unanswered)
            continue
        _refuse_unanswered(unanswered)
        if role == "system":
            messages.append(SystemMessage(content=_text(block for _, block in blocks)))
        else:
            message = _of_assistant(blocks)
            unanswered |= {call.id: _path_of(call.id, blocks) for call in message.tool_calls or ()}
            messages.append(message)
    _refuse_unanswered(unanswered)
    return tuple(messages)


def _numbered(messages: Sequence[GivenMessage]) -> Iterable[tuple[str, GivenMessage]]:
    return ((f"messages[{i}]", message) for i, message in enumerate(messages))


def _blocks(where: str, message: GivenMessage) -> _Blocks:
    """The blocks of a turn, each with its path."""
    if isinstance(message.content, str):
        return [(f"{where}.content", TextBlock(text=message.content))]
    blocks = [(f"{where}.content[{i}]", block) for i, block in enumerate(message.content)]
    allowed = _ALLOWED[message.role]
    told = [(path, block) for path, block in blocks if type(block).type != "redacted_thinking"]
    for path, block in told:
        if not isinstance(block, allowed):
            raise ParameterError(
                f"{path}.type",
                f"{path}.type: a message of the role {message.role} has no {block.type} blocks.",
            )
    return told


def _of_user(blocks: _Blocks, unanswered: dict[str, str]) -> list[Message]:
    messages: list[Message] = []
    texts: list[TextBlock] = []
    for path, block in blocks:
        if isinstance(block, TextBlock):
            texts.append(block)
            continue
        assert isinstance(block, ToolResultBlock)
        if texts:
            raise ParameterError(
                path, f"{path}: results of tools come before the text of a message."
            )
        if unanswered.pop(block.tool_use_id, None) is None:
            raise ParameterError(
                f"{path}.tool_use_id",
                f"{path}: no tool_use block before it has the id {block.tool_use_id!r:.100}.",
            )
        messages.append(ToolMessage(content=_result(block), tool_call_id=block.tool_use_id))
    _refuse_unanswered(unanswered)
    if texts or not messages:
        messages.append(UserMessage(content=_text(texts)))
    return messages


def _refuse_unanswered(unanswered: Mapping[str, str]) -> None:
    for call_id, path in unanswered.items():
        raise ParameterError(
            path,
            f"{path}: the next message of the user must have the tool_result of {call_id!r:.100}.",
        )


def _path_of(call_id: str, blocks: _Blocks) -> str:
    return next(
        path for path, block in blocks if isinstance(block, ToolUseBlock) and block.id == call_id
    )


def _of_assistant(blocks: _Blocks) -> EchoedMessage:
    calls = tuple(
        MessageToolCall(
            id=block.id,
            function=CalledFunction(
                name=block.name, arguments=msgspec.json.encode(block.input).decode()
            ),
        )
        for _, block in blocks
        if isinstance(block, ToolUseBlock)
    )
    thoughts = "".join(block.thinking for _, block in blocks if isinstance(block, ThinkingBlock))
    return EchoedMessage(
        content=_text(block for _, block in blocks),
        tool_calls=calls or None,
        reasoning_content=thoughts or None,
    )


def _text(blocks: Iterable[ContentBlock]) -> str:
    return "".join(block.text for block in blocks if isinstance(block, TextBlock))


def _result(block: ToolResultBlock) -> str:
    """Templates know no failed calls, so the text says it."""
    content = block.content
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    return f"Error: {text}" if block.is_error else text


def _chat_request(request: MessagesRequest, messages: tuple[Message, ...]) -> ChatCompletionRequest:
    thinking, output, choice = request.thinking, request.output_config, request.tool_choice
    thinks = thinking is not None and thinking.type in _THINKING
    tier = request.service_tier
    return ChatCompletionRequest(
        model=request.model,
        messages=messages,
        max_completion_tokens=request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        stop=request.stop_sequences,
        stream=request.stream,
        tools=tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools or ())),
        tool_choice=_choice(choice),
        parallel_tool_calls=not (choice is not None and choice.disable_parallel_tool_use),
        response_format=_format(output.format.schema) if output and output.format else None,
        reasoning_effort=output.effort if output else None,
        enable_thinking=thinks,
        thinking_token_budget=thinking.budget_tokens if thinking and thinks else None,
        continue_final_message=isinstance(messages[-1], EchoedMessage),
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
