"""Messages of a conversation in OpenAI's format, told apart by their role.

A client sends assistant messages and tool results back as its SDK stored them, with fields that the
SDK or another server added. Unknown fields of these messages are ignored. An unknown field of
another role's message raises an error that names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec


class TextPart(msgspec.Struct, frozen=True):
    """Text part of a message's content."""

    text: str
    type: Literal["text"] = "text"


class EchoedPart(msgspec.Struct, frozen=True, kw_only=True):
    """Part of an assistant message: ``text``, or a ``refusal``, which the model reads as text. A
    part of another type without ``text`` is replaced by a sentence."""

    text: str = ""
    refusal: str = ""
    type: str = "text"

    @property
    def is_text(self) -> bool:
        return self.type in ("text", "refusal") or bool(self.text)

    @property
    def words(self) -> str:
        return self.refusal if self.type == "refusal" else self.text


class ToolPart(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a tool result: ``text``. A part of another type without ``text``, such as
    ``image_url``, is replaced by a sentence."""

    text: str | msgspec.UnsetType = msgspec.UNSET
    type: str = "text"

    @property
    def is_text(self) -> bool:
        return self.type == "text" or bool(self.text)

    @property
    def words(self) -> str:
        return self.text or ""


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    """Called function. ``arguments`` is JSON in a string."""

    name: str
    arguments: str


class CalledCustom(msgspec.Struct, frozen=True, kw_only=True):
    """Called custom tool. ``input`` is text."""

    name: str
    input: str


class MessageToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """Tool call by an assistant, of a ``function`` or a ``custom`` tool."""

    id: str
    function: CalledFunction | msgspec.UnsetType = msgspec.UNSET
    custom: CalledCustom | msgspec.UnsetType = msgspec.UNSET
    type: Literal["function", "custom"] = "function"


class _AnyMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="role"):
    """Message of any role. ``tool_calls`` belong to assistant messages and ``tool_call_id`` to tool
    messages; both are declared here so that other roles can refuse them."""

    name: str | None = None
    tool_calls: tuple[MessageToolCall, ...] | None = None
    tool_call_id: str | None = None

    @property
    def role(self) -> str:
        return str(self.__struct_config__.tag)


class UserMessage(_AnyMessage, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="user"):
    """Message of the user. Fields of type Any are known but not supported."""

    content: str | tuple[TextPart, ...] | None = None
    refusal: Any = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None


class SystemMessage(UserMessage, frozen=True, kw_only=True, tag="system"):
    """Instructions to the model."""


class DeveloperMessage(UserMessage, frozen=True, kw_only=True, tag="developer"):
    """Newer name of a system message."""


class EchoedMessage(_AnyMessage, frozen=True, kw_only=True, tag="assistant"):
    """Earlier answer, sent back; null content is empty text. ``reasoning_content`` and
    ``reasoning`` are two names of its thoughts; a value that is not text is ignored, as unknown
    fields are. ``refusal`` is the text of an answer that has neither content nor calls. ``audio``
    and ``function_call`` are refused if the answer has nothing else."""

    content: str | tuple[EchoedPart, ...] | None = None
    refusal: Any = None
    audio: Any = None
    function_call: Any = None
    reasoning_content: Any = None
    reasoning: Any = None


class ToolMessage(_AnyMessage, frozen=True, kw_only=True, tag="tool"):
    """Result of the call ``tool_call_id``; null is empty text."""

    content: str | tuple[ToolPart, ...] | None = None


Message = UserMessage | SystemMessage | DeveloperMessage | EchoedMessage | ToolMessage

MESSAGE_OF_ROLE: Mapping[str, type[Message]] = {
    str(kind.__struct_config__.tag): kind
    for kind in (SystemMessage, DeveloperMessage, UserMessage, EchoedMessage, ToolMessage)
}
