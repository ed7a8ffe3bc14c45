"""Messages, tools, metadata and priority as OpenAI's clients send them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import msgspec

from millrace.registry.tool_formats.freeform import arguments_of_input
from millrace.schemas.chat.messages import (
    DeveloperMessage,
    EchoedMessage,
    EchoedPart,
    Message,
    MessageToolCall,
    TextPart,
    ToolMessage,
    ToolPart,
    UserMessage,
)
from millrace.schemas.chat.unreadable import sentence_for
from millrace.schemas.errors import ParameterError
from millrace.schemas.jobs import ChatMessage, check_priority
from millrace.schemas.jobs import check_metadata as check_job_metadata
from millrace.schemas.notices import Notice, NoticeCode, Notices, notice
from millrace.schemas.openai import GenerationFields
from millrace.schemas.tools import ToolCall

# Values that ask for nothing, of fields that are known but not honoured.
NOTHING: tuple[Any, ...] = (None, [], {})
NEUTRAL_IN_MESSAGE: dict[str, tuple[Any, ...]] = {
    "refusal": (None,),
    "annotations": NOTHING,
    "audio": (None,),
    "function_call": (None,),
}


def left_out_at(where: str, kind: str) -> Notice:
    """Return the notice of content of the type ``kind`` at ``where``."""
    return notice(NoticeCode.CONTENT_LEFT_OUT, where, kind)


def text_of_parts(parts: Sequence[ToolPart | EchoedPart]) -> str:
    """Return the text of a message's parts. Sentences in place of others are on lines of their
    own."""
    texts = [part.words if part.is_text else sentence_for(part.type) for part in parts]
    is_text = all(part.is_text for part in parts)
    return ("" if is_text else "\n").join(filter(None, texts))


def left_out_of(messages: Iterable[Message]) -> Notices:
    """Return a notice for each part of the messages that the model does not read."""
    notices: list[Notice] = []
    for i, message in enumerate(messages):
        if not isinstance(message, ToolMessage | EchoedMessage):
            continue
        parts: Sequence[ToolPart | EchoedPart] = (
            message.content if isinstance(message.content, tuple) else ()
        )
        notices += (
            left_out_at(f"messages[{i}].content[{j}]", part.type)
            for j, part in enumerate(parts)
            if not part.is_text
        )
    return tuple(notices)


_NEUTRAL_IN_EMPTY_ANSWER = {name: NEUTRAL_IN_MESSAGE[name] for name in ("audio", "function_call")}


def chat_messages(messages: tuple[Message, ...]) -> tuple[ChatMessage, ...]:
    """The conversation as jobs carry it: parts of text joined, ``developer`` read as ``system``."""
    if not messages:
        raise ParameterError("messages", "messages must hold at least one message.")
    return tuple(_chat_message(message, f"messages[{i}]") for i, message in enumerate(messages))


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
        raise ParameterError(
            f"{where}.tool_calls", f"{where}.tool_calls: only an assistant's message has them."
        )
    if (message.tool_call_id is not None) != isinstance(message, ToolMessage):
        raise ParameterError(
            f"{where}.tool_call_id",
            f"{where}.tool_call_id goes with messages of the role tool, and each of them needs it.",
        )
    if message.content is None and isinstance(message, UserMessage):
        raise ParameterError(f"{where}.content", f"{where}.content must be text.")
    calls = tuple(
        _called(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls or ())
    )
    if isinstance(message, ToolMessage) and isinstance(message.content, tuple):
        _check_parts(message.content, f"{where}.content")
    text = _text_of(message)
    if isinstance(message, EchoedMessage) and not (text or calls):
        refuse_unhonoured(message, _NEUTRAL_IN_EMPTY_ANSWER, f"{where}.")
    role = "system" if isinstance(message, DeveloperMessage) else message.role
    reasoning = _reasoning_of(message) if isinstance(message, EchoedMessage) else ""
    return ChatMessage(role, text, message.name, calls, message.tool_call_id, reasoning)


def _text_of(message: Message) -> str:
    """Return the text of a message; of an answer without text or calls, its refusal."""
    content = message.content or ""
    if isinstance(content, str):
        text = content
    elif isinstance(message, ToolMessage | EchoedMessage):
        text = text_of_parts(cast("tuple[ToolPart | EchoedPart, ...]", content))
    else:
        text = "".join(part.text for part in cast("tuple[TextPart, ...]", content))
    if text or message.tool_calls or not isinstance(message, EchoedMessage):
        return text
    return message.refusal if isinstance(message.refusal, str) else ""


def _check_parts(parts: Sequence[ToolPart], where: str) -> None:
    for i, part in enumerate(parts):
        if part.is_text and part.text is msgspec.UNSET:
            raise ParameterError(f"{where}[{i}].text", f"{where}[{i}].text is required.")


def _called(call: MessageToolCall, where: str) -> ToolCall:
    """The input of a custom tool is its one argument."""
    if call.type == "custom":
        if call.custom is msgspec.UNSET:
            raise ParameterError(f"{where}.custom", f"{where}.custom is required.")
        arguments = arguments_of_input(call.custom.input)
        return ToolCall(id=call.id, name=call.custom.name, arguments=arguments)
    if call.function is msgspec.UNSET:
        raise ParameterError(f"{where}.function", f"{where}.function is required.")
    return ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)


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


def keeps_stop_string(request: GenerationFields) -> bool | None:
    """Whether the text keeps the stop string that ends it, by either name of the field. Raises
    ParameterError if they differ."""
    ours, theirs = request.include_stop_str_in_output, request.no_stop_trim
    if None not in (ours, theirs) and ours != theirs:
        raise ParameterError(
            "no_stop_trim",
            "no_stop_trim and include_stop_str_in_output differ; give one of them.",
        )
    return theirs if ours is None else ours


def respelled(error: ParameterError, words: Mapping[str, str]) -> ParameterError:
    """The refusal of a field in the words of an API that has others for it."""
    return ParameterError(in_words(error.param, words), in_words(error.message, words))


def words_in_words(words: Mapping[str, str], others: Mapping[str, str]) -> dict[str, str]:
    """Apply ``others`` to the names in ``words``, and add ``others``."""
    return {**others, **{ours: in_words(theirs, others) for ours, theirs in words.items()}}


def in_words(text: str, words: Mapping[str, str]) -> str:
    """The text with the names of fields that an API has others for."""
    for ours, theirs in words.items():
        text = re.sub(rf"(?<![\w.]){re.escape(ours)}(?!\w)", theirs, text)
    return text


def _same(value: Any, nothing: Any) -> bool:
    return isinstance(value, bool) == isinstance(nothing, bool) and bool(value == nothing)
