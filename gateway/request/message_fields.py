"""Messages, tools, metadata and priority as OpenAI's clients send them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, Literal

import msgspec

from millrace.schemas.chat.messages import (
    DeveloperMessage,
    EchoedMessage,
    Message,
    ToolMessage,
    UserMessage,
)
from millrace.schemas.errors import ParameterError
from millrace.schemas.jobs import ChatMessage, check_priority
from millrace.schemas.jobs import check_metadata as check_job_metadata
from millrace.schemas.openai import FunctionTool
from millrace.schemas.tools import MAX_TOOLS, ToolCall, ToolChoice, ToolDefinition, ToolMode

# Values that ask for nothing, of fields that are known but not honoured.
NOTHING: tuple[Any, ...] = (None, [], {})
NEUTRAL_IN_MESSAGE: dict[str, tuple[Any, ...]] = {
    "refusal": (None,),
    "annotations": NOTHING,
    "audio": (None,),
    "function_call": (None,),
}


def chat_messages(messages: tuple[Message, ...]) -> tuple[ChatMessage, ...]:
    """The conversation as jobs carry it: parts of text joined, ``developer`` read as ``system``."""
    if not messages:
        raise ParameterError("messages", "messages must hold at least one message.")
    return tuple(_chat_message(message, f"messages[{i}]") for i, message in enumerate(messages))


def tools_of(tools: tuple[FunctionTool, ...] | None) -> tuple[ToolDefinition, ...]:
    """Raises ParameterError for bad or double names."""
    if not tools:
        return ()
    if len(tools) > MAX_TOOLS:
        raise ParameterError("tools", f"at most {MAX_TOOLS} tools are taken")
    definitions = tuple(
        ToolDefinition(
            name=tool.function.name,
            description=tool.function.description or "",
            parameters=tool.function.parameters,
            strict=bool(tool.function.strict),
        )
        for tool in tools
    )
    names = [tool.name for tool in definitions]
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None:
        raise ParameterError("tools", f"tools has {double} twice.")
    return definitions


def tool_choice_of(value: Any, names: Collection[str]) -> ToolChoice:
    """From ``auto``, ``none``, ``required`` or an object that names a function. ``names`` are those
    of the tools that there are."""
    if value is None or value == "auto":
        return ToolChoice()
    if value == "none":
        return ToolChoice(mode=ToolMode.NONE)
    if not names:
        raise ParameterError("tool_choice", "tool_choice demands a tool, but there are no tools.")
    if value == "required":
        return ToolChoice(mode=ToolMode.REQUIRED)
    try:
        named = msgspec.convert(value, _NamedTool)
    except msgspec.ValidationError as error:
        raise ParameterError(
            "tool_choice",
            "tool_choice must be auto, none, required or an object that names a function.",
        ) from error
    if named.function.name not in names:
        raise ParameterError("tool_choice", f"There is no tool {named.function.name!r:.100}.")
    return ToolChoice(mode=ToolMode.NAMED, name=named.function.name)


class _ToolName(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str


class _NamedTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    function: _ToolName
    type: Literal["function"] = "function"


def check_metadata(metadata: dict[str, str] | None) -> None:
    """Raises ParameterError for more than OpenAI's API takes."""
    try:
        check_job_metadata(metadata or {})
    except ValueError as error:
        raise ParameterError("metadata", f"{error}.") from error


def metadata_of(given: dict[str, str] | None) -> dict[str, str]:
    """Raises ParameterError as ``check_metadata``."""
    check_metadata(given)
    return given or {}


def priority_of(given: int | None) -> int:
    """Raises ParameterError for one that no job can have."""
    priority = given or 0
    try:
        check_priority(priority)
    except ValueError as error:
        raise ParameterError("priority", f"{error}, got {given}") from error
    return priority


def _chat_message(message: Message, where: str) -> ChatMessage:
    if isinstance(message, UserMessage):
        refuse_unhonoured(message, NEUTRAL_IN_MESSAGE, f"{where}.")
    if message.tool_calls and not isinstance(message, EchoedMessage):
        raise ParameterError(f"{where}.tool_calls", "Only an assistant's message has tool_calls.")
    if (message.tool_call_id is not None) != isinstance(message, ToolMessage):
        raise ParameterError(
            f"{where}.tool_call_id", "A message of the role tool, and no other, has tool_call_id."
        )
    content = message.content
    if content is None:
        if not message.tool_calls:
            raise ParameterError(f"{where}.content", f"{where}.content must be text.")
        content = ""
    if not isinstance(content, str):
        content = "".join(part.text for part in content)
    calls = tuple(
        ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
        for call in message.tool_calls or ()
    )
    role = "system" if isinstance(message, DeveloperMessage) else message.role
    reasoning = _reasoning_of(message) if isinstance(message, EchoedMessage) else ""
    return ChatMessage(role, content, message.name, calls, message.tool_call_id, reasoning)


def _reasoning_of(message: EchoedMessage) -> str:
    thoughts = (message.reasoning_content, message.reasoning)
    return next((text for text in thoughts if isinstance(text, str) and text), "")


def refuse_unhonoured(
    struct: msgspec.Struct, neutral: Mapping[str, tuple[Any, ...]], prefix: str
) -> None:
    """Raises ParameterError naming a field of ``neutral`` that asks for something."""
    for name in struct.__struct_fields__:
        allowed = neutral.get(name)
        if allowed is None:
            continue
        value = getattr(struct, name)
        if value is None or any(_same(value, nothing) for nothing in allowed):
            continue
        raise ParameterError(f"{prefix}{name}", f"{prefix}{name} is not supported; leave it out.")


def respelled(error: ParameterError, words: Mapping[str, str]) -> ParameterError:
    """The refusal of a field in the words of an API that has others for it."""
    return ParameterError(in_words(error.param, words), in_words(error.message, words))


def words_in_words(words: Mapping[str, str], others: Mapping[str, str]) -> dict[str, str]:
    """The words of an API that has others for some of them."""
    return {**others, **{ours: in_words(theirs, others) for ours, theirs in words.items()}}


def in_words(text: str, words: Mapping[str, str]) -> str:
    """The text with the names of fields that an API has others for."""
    for ours, theirs in words.items():
        text = re.sub(rf"(?<![\w.]){re.escape(ours)}(?!\w)", theirs, text)
    return text


def _same(value: Any, nothing: Any) -> bool:
    return isinstance(value, bool) == isinstance(nothing, bool) and bool(value == nothing)
