"""What a line of ``millrace generate`` says about a conversation: as OpenAI's clients write it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from millrace.gateway.request.message_fields import chat_messages, tool_choice_of, tools_of
from millrace.registry.tool_formats import ArgumentsPiece, CallPiece, ToolCallParser, call_grammar
from millrace.schemas.chat.messages import Message
from millrace.schemas.errors import ParameterError
from millrace.schemas.jobs import ChatMessage
from millrace.schemas.openai import FunctionTool
from millrace.schemas.sampling import Grammar
from millrace.schemas.tools import ToolChoice, ToolDefinition, ToolFormat, ToolMode


class ChatRow(msgspec.Struct, frozen=True):
    """The fields of a line that belong to a conversation, as they were written."""

    messages: list[Any] | None = None
    tools: tuple[FunctionTool, ...] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None


class ChatFields(NamedTuple):
    """A conversation as jobs carry it, the tools that are told to the model, and whether and how
    often it calls them."""

    messages: tuple[ChatMessage, ...] | None
    tools: tuple[ToolDefinition, ...]
    choice: ToolChoice
    parallel: bool

    def grammar(self, tool_format: ToolFormat | None, answer: Grammar | None) -> Grammar | None:
        """What the completion must match; ``answer`` is what it had to without tools. Raises
        ParameterError."""
        if not self.tools or tool_format is None:
            return answer
        return call_grammar(tool_format, self.tools, self.choice, self.parallel, answer)


def read_chat(row: ChatRow) -> ChatFields:
    """Raises ParameterError for what is no conversation and for tools that cannot be."""
    tools = tools_of(row.tools)
    choice = tool_choice_of(row.tool_choice, {tool.name for tool in tools})
    return ChatFields(
        messages=None if row.messages is None else _messages(row.messages),
        tools=() if choice.mode is ToolMode.NONE else tools,
        choice=choice,
        parallel=row.parallel_tool_calls is not False,
    )


def tool_calls(
    text: str, tool_format: ToolFormat, tools: Sequence[ToolDefinition]
) -> list[dict[str, Any]]:
    """The calls in a completion, as OpenAI's API writes them; ids are numbers from 0."""
    numbers = itertools.count()
    parser = ToolCallParser(tool_format, lambda: f"call_{next(numbers)}", tools)
    calls: list[dict[str, Any]] = []
    for piece in [*parser.push(text), *parser.finish()]:
        if isinstance(piece, CallPiece):
            function = {"name": piece.name, "arguments": ""}
            calls.append({"id": piece.call_id, "type": "function", "function": function})
        elif isinstance(piece, ArgumentsPiece):
            calls[piece.call]["function"]["arguments"] += piece.text
    return calls


def _messages(raw: list[Any]) -> tuple[ChatMessage, ...]:
    try:
        if _are_of_a_job(raw):
            return msgspec.convert(raw, tuple[ChatMessage, ...])
        return chat_messages(msgspec.convert(raw, tuple[Message, ...]))
    except msgspec.ValidationError as error:
        raise ParameterError("messages", f"messages: {error}") from error


def _are_of_a_job(raw: list[Any]) -> bool:
    """Whether calls are written as a job's are, which have no object ``function``."""
    calls = (
        call
        for message in raw
        if isinstance(message, dict) and isinstance(message.get("tool_calls"), list)
        for call in message["tool_calls"]
    )
    return any(isinstance(call, dict) and "function" not in call for call in calls)
