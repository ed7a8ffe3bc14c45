"""Messages, tools, metadata and priority in the form of OpenAI's clients."""

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

# Values that demand nothing, of fields that are known but not supported.
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
    """Return the text of a message's parts. Sentences that replace other parts are on their own
    lines.
    """
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
    """Return the conversation in the form of jobs: text parts joined, ``developer`` as
    ``system``.
    """
    if not messages:
        raise ParameterError("messages", "messages must hold at least one message.")
    return tuple(_chat_message(message, f"messages[{i}]") for i, message in enumerate(messages))


def check_metadata(metadata: dict[str, str] | None) -> None:
    """Check metadata against the limits of OpenAI's API. Raises ParameterError."""
    try:
        check_job_metadata(metadata or {})
    except ValueError as error:
        raise ParameterError("metadata", f"{error}.") from error


def metadata_of(given: dict[str, str] | None) -> dict[str, str]:
    """Return the metadata after checking it. Raises ParameterError."""
    check_metadata(given)
    return given or {}


def priority_of(given: int | None) -> int:
    """Return the priority, 0 by default. Raises ParameterError if no job can have it."""
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
            f"{where}.tool_calls", f"{where}.tool_calls: only assistant messages may have them."
        )
    if (message.tool_call_id is not None) != isinstance(message, ToolMessage):
        raise ParameterError(
            f"{where}.tool_call_id",
            f"{where}.tool_call_id is required in messages of the role tool, and only there.",
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
    """Return the text of a message; for an answer without text or calls, its refusal."""
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
    """Convert a call; the input of a custom tool becomes its one argument."""
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
    """Raise ParameterError naming a field of ``neutral`` with a value that demands something."""
    for name in struct.__struct_fields__:
        allowed = neutral.get(name)
        if allowed is None:
            continue
        value = getattr(struct, name)
        if value is None or any(_same(value, nothing) for nothing in allowed):
            continue
        raise ParameterError(f"{prefix}{name}", f"{prefix}{name} is not supported; remove it.")


def keeps_stop_string(request: GenerationFields) -> bool | None:
    """Return whether the text keeps the stop string that ends it, from either name of the field.

    Raises:
        ParameterError: the two fields differ.
    """
    ours, theirs = request.include_stop_str_in_output, request.no_stop_trim
    if None not in (ours, theirs) and ours != theirs:
        raise ParameterError(
            "no_stop_trim",
            "no_stop_trim and include_stop_str_in_output differ; give one of them.",
        )
    return theirs if ours is None else ours


def respelled(error: ParameterError, words: Mapping[str, str]) -> ParameterError:
    """Return the error with the field names of an API that has its own."""
    return ParameterError(in_words(error.param, words), in_words(error.message, words))


def words_in_words(words: Mapping[str, str], others: Mapping[str, str]) -> dict[str, str]:
    """Apply ``others`` to the names in ``words``, and add ``others``."""
    return {**others, **{ours: in_words(theirs, others) for ours, theirs in words.items()}}


def in_words(text: str, words: Mapping[str, str]) -> str:
    """Return the text with an API's own field names."""
    for ours, theirs in words.items():
        text = re.sub(rf"(?<![\w.]){re.escape(ours)}(?!\w)", theirs, text)
    return text


def _same(value: Any, nothing: Any) -> bool:
    return isinstance(value, bool) == isinstance(nothing, bool) and bool(value == nothing)
