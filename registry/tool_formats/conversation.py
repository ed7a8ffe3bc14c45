"""Tools, calls and results in a conversation, for chat templates or as plain text."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from millrace.registry.template_text import filled, joined, literal
from millrace.registry.tool_formats.call_style import CallStyle
from millrace.registry.tool_formats.written import INSTRUCTIONS, arguments_of, calls_as_text
from millrace.schemas.jobs import ChatMessage
from millrace.schemas.tools import ToolCall, ToolDefinition, ToolFormat

_SHORT = re.compile(r"[A-Za-z0-9]{9}")
# Templates of these models accept only ids of nine letters and digits.
WITH_SHORT_IDS = frozenset({ToolFormat.MISTRAL, ToolFormat.MISTRAL_V11})


def new_call_id(tool_format: ToolFormat, seed: str) -> str:
    """Return the id for ``seed``: the same for the same seed, different for another."""
    digest = hashlib.sha256(seed.encode()).hexdigest()
    return digest[:9] if tool_format in WITH_SHORT_IDS else f"call_{digest[:24]}"


def short_id(call_id: str) -> str:
    """Return the id if it has nine letters and digits, else an id derived from it."""
    if _SHORT.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}

DEFAULT_STYLE = CallStyle()

_INTRODUCTION = (
    "You have tools. Each line between <tools> and </tools> describes one: its name, what it is "
    "for, and the JSON Schema of its arguments.\n<tools>\n{tools}\n</tools>\n"
)
_IN_LINES, _IN_PARAGRAPHS = "{first}\n{second}", "{first}\n\n{second}"
_OTHERWISE = "Answer without a call when no tool is needed."
_CONCLUSION = f"The results come between <tool_response> and </tool_response>. {_OTHERWISE}"


def tool_as_dict(tool: ToolDefinition) -> dict[str, Any]:
    """Return a tool in OpenAI's form, which templates expect."""
    parameters = _NO_PARAMETERS if tool.parameters is None else tool.parameters
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


def messages_as_dicts(
    messages: Sequence[ChatMessage], style: CallStyle = DEFAULT_STYLE
) -> list[dict[str, Any]]:
    """Return a conversation in OpenAI's form.

    Arguments of calls are objects if they are valid JSON, unless ``style`` says otherwise: most
    templates write them as JSON themselves. Results have the name of the called tool.
    """
    names: dict[str, str] = {}
    turns = []
    for message in messages:
        role = literal(message.role)
        turn: dict[str, Any] = {"role": role, "content": message.content}
        name = message.name
        if message.reasoning:
            turn["reasoning_content"] = turn["reasoning"] = message.reasoning
        if message.tool_calls:
            if style.apart and message.content:
                turns.append(turn)
                turn = {"role": role, "content": ""}
            if style.without_content:
                turn["content"] = turn["content"] or None
            turn["tool_calls"] = [_call_as_dict(call, style) for call in message.tool_calls]
            names |= {call.id: call.name for call in message.tool_calls}
        if message.tool_call_id is not None:
            turn["tool_call_id"] = _id_for(message.tool_call_id, style)
            name = name or names.get(message.tool_call_id)
        if name is not None:
            turn["name"] = name
        turns.append(turn)
    return turns


def one_call_a_turn(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return the conversation with parallel calls in separate turns, each with its result, for
    templates that accept one call per turn.
    """
    told: list[ChatMessage] = []
    waiting: list[ChatMessage] = []
    for message in messages:
        if message.role == "tool":
            _put_with_its_result(told, waiting, message)
            continue
        told += waiting
        first, *others = message.tool_calls or (None,)
        waiting = [
            msgspec.structs.replace(message, content="", tool_calls=(call,)) for call in others
        ]
        told.append(
            message if first is None else msgspec.structs.replace(message, tool_calls=(first,))
        )
    return told + waiting


def _put_with_its_result(
    told: list[ChatMessage], waiting: list[ChatMessage], result: ChatMessage
) -> None:
    for i, turn in enumerate(waiting):
        if turn.tool_calls[0].id == result.tool_call_id:
            told.append(waiting.pop(i))
            break
    told.append(result)


def in_plain_text(
    messages: Sequence[ChatMessage], tools: Sequence[ToolDefinition], tool_format: ToolFormat
) -> Iterator[list[ChatMessage]]:
    """Yield the conversation for a template without tools, with calls in ``tool_format``.

    Calls are an assistant's text, results a user's. The first form describes the tools in the
    system message. The second, for templates without system messages, describes them in the first
    user turn.
    """
    turns = _turns_in_plain_text(messages, tool_format)
    yield from _with_description(turns, tools, tool_format, _CONCLUSION)


def with_tools_described(
    messages: Sequence[ChatMessage], tools: Sequence[ToolDefinition], tool_format: ToolFormat
) -> Iterator[list[ChatMessage]]:
    """Yield the conversation for a template that accepts calls and results but no tools; the tools
    are described as in ``in_plain_text``.
    """
    yield from _with_description(list(messages), tools, tool_format, _OTHERWISE)


def _with_description(
    turns: list[ChatMessage],
    tools: Sequence[ToolDefinition],
    tool_format: ToolFormat,
    conclusion: str,
) -> Iterator[list[ChatMessage]]:
    if not tools:
        yield turns
        return
    told = joined((_description(tools, tool_format), literal(conclusion)))
    if turns and turns[0].role in ("system", "developer"):
        told = filled(_IN_PARAGRAPHS, first=turns[0].content, second=told)
        yield [_with_text(turns[0], told), *turns[1:]]
        turns = turns[1:]
    else:
        yield [ChatMessage("system", told), *turns]
    for i, turn in enumerate(turns):
        if turn.role == "user":
            text = filled(_IN_PARAGRAPHS, first=told, second=turn.content)
            yield [*turns[:i], _with_text(turn, text), *turns[i + 1 :]]
            return


def _description(tools: Sequence[ToolDefinition], tool_format: ToolFormat) -> str:
    lines = (json.dumps(tool_as_dict(tool)["function"], ensure_ascii=False) for tool in tools)
    described = filled(_INTRODUCTION, tools="\n".join(lines))
    return described + literal(INSTRUCTIONS[tool_format])


def _turns_in_plain_text(
    messages: Sequence[ChatMessage], tool_format: ToolFormat
) -> list[ChatMessage]:
    """Return the turns. Consecutive results and user messages become one turn, since many templates
    need alternating turns.
    """
    turns: list[ChatMessage] = []
    were_results = False
    for message in messages:
        text = message.content
        if message.role == "tool":
            text = filled("<tool_response>\n{text}\n</tool_response>", text=text)
        elif message.tool_calls:
            calls = calls_as_text(message.tool_calls, tool_format)
            text = filled(_IN_LINES, first=text, second=calls) if text else calls
        if were_results and message.role in ("tool", "user"):
            told = filled(_IN_LINES, first=turns[-1].content, second=text)
            turns[-1] = _with_text(turns[-1], told)
        elif message.role == "tool":
            turns.append(ChatMessage("user", text))
        else:
            turns.append(msgspec.structs.replace(message, content=text, tool_calls=()))
        were_results = message.role == "tool"
    return turns


def _with_text(message: ChatMessage, text: str) -> ChatMessage:
    return msgspec.structs.replace(message, content=text)


def _call_as_dict(call: ToolCall, style: CallStyle) -> dict[str, Any]:
    arguments = call.arguments if style.arguments_as_text else arguments_of(call)
    function = {"name": call.name, "arguments": arguments}
    return {"id": _id_for(call.id, style), "type": "function", "function": function}


def _id_for(call_id: str, style: CallStyle) -> str:
    return short_id(call_id) if style.short_ids else call_id
