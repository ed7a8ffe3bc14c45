"""Conversations and tools in the format of OpenAI's API, and the tool calls of a completion."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import msgspec

from millrace.registry.requests.message_fields import chat_messages
from millrace.registry.requests.offered.chat_tools import given_tools
from millrace.registry.requests.offered.offered_tools import asked_choice, offered_tools
from millrace.registry.tool_formats import ArgumentsPiece, CallPiece, ToolCallParser, call_grammar
from millrace.registry.tool_formats.freeform import input_of
from millrace.schemas.chat.messages import Message
from millrace.schemas.errors import ParameterError
from millrace.schemas.jobs import ChatMessage
from millrace.schemas.sampling import Grammar
from millrace.schemas.tools import ToolChoice, ToolDefinition, ToolFormat, ToolMode


class OfflineChat(NamedTuple):
    """Conversation of a job, with its tools.

    Attributes:
        messages: None if the prompt is a text.
        tools: Tools that the model is told of.
        choice: Whether the model calls tools.
        parallel: Whether it may call several.
        freeform: Input patterns of tools whose input is text, by tool name.
    """

    messages: tuple[ChatMessage, ...] | None = None
    tools: tuple[ToolDefinition, ...] = ()
    choice: ToolChoice = ToolChoice()
    parallel: bool = True
    freeform: dict[str, str] = {}  # noqa: RUF012 (never written to)

    def grammar(self, tool_format: ToolFormat | None, answer: Grammar | None) -> Grammar | None:
        """Return the grammar of the completion.

        ``answer`` is its grammar without tools. Raises ParameterError.
        """
        if not self.tools or tool_format is None:
            return answer
        return call_grammar(
            tool_format, self.tools, self.choice, self.parallel, answer, self.freeform
        )


NO_CHAT = OfflineChat()


def read_chat(
    messages: Sequence[Any] | None,
    tools: Sequence[dict[str, Any]] = (),
    tool_choice: Any = None,
    *,
    parallel: bool = True,
) -> OfflineChat:
    """Read a conversation and its tools.

    Raises ParameterError for invalid messages, for tools that cannot be offered, and for tools that
    would be left out, since an offline answer has no field for notices.
    """
    raws = [msgspec.Raw(msgspec.json.encode(tool)) for tool in tools]
    offered = offered_tools(given_tools(raws), asked_choice(tool_choice))
    if offered.notices:
        first = offered.notices[0]
        raise ParameterError(first.param, f"{first.param}: {first.code} ({first.detail}).")
    return OfflineChat(
        messages=None if messages is None else _messages(messages),
        tools=() if offered.choice.mode is ToolMode.NONE else offered.tools,
        choice=offered.choice,
        parallel=parallel,
        freeform=offered.freeform,
    )


def tool_calls(
    text: str,
    tool_format: ToolFormat,
    tools: Sequence[ToolDefinition],
    freeform: Collection[str] = (),
) -> list[dict[str, Any]]:
    """Return the calls in a completion, in the format of OpenAI's API; ids are numbers from 0.

    Calls of ``freeform`` tools are custom.
    """
    numbers = itertools.count()
    parser = ToolCallParser(tool_format, lambda: f"call_{next(numbers)}", tools)
    calls: list[dict[str, Any]] = []
    for piece in [*parser.push(text), *parser.finish()]:
        if isinstance(piece, CallPiece):
            function = {"name": piece.name, "arguments": ""}
            calls.append({"id": piece.call_id, "type": "function", "function": function})
        elif isinstance(piece, ArgumentsPiece):
            calls[piece.call]["function"]["arguments"] += piece.text
    return [_custom(call) if call["function"]["name"] in freeform else call for call in calls]


def _custom(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    custom = {"name": function["name"], "input": input_of(function["arguments"])}
    return {"id": call["id"], "type": "custom", "custom": custom}


def _messages(raw: Sequence[Any]) -> tuple[ChatMessage, ...]:
    try:
        if _are_of_a_job(raw):
            return msgspec.convert(raw, tuple[ChatMessage, ...])
        return chat_messages(msgspec.convert(raw, tuple[Message, ...]))
    except msgspec.ValidationError as error:
        raise ParameterError("messages", f"messages: {error}") from error


def _are_of_a_job(raw: Sequence[Any]) -> bool:
    """Return whether calls have the format of a job, which has no object ``function``."""
    calls = (
        call
        for message in raw
        if isinstance(message, dict) and isinstance(message.get("tool_calls"), list)
        for call in message["tool_calls"]
    )
    return any(
        isinstance(call, dict) and call.keys().isdisjoint({"function", "custom"}) for call in calls
    )
