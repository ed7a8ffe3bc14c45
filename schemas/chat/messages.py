"""The messages of a conversation as OpenAI's clients send them, told apart by their role.

A client sends an assistant's messages and tools' results back as its SDK keeps them, with fields
that the SDK or another server added: what is not known in these is ignored. A field of another
role's message that is not known is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec


class TextPart(msgspec.Struct, frozen=True):
    """A piece of a message's content."""

    text: str
    type: Literal["text"] = "text"


class EchoedPart(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of an assistant's message: ``text``, or a ``refusal``, which the model reads as
    text. In place of a piece of another type without ``text`` the model reads a sentence."""

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
    """A piece of a tool's result: ``text``. In place of a piece of another type without ``text``,
    such as ``image_url``, the model reads a sentence."""

    text: str | msgspec.UnsetType = msgspec.UNSET
    type: str = "text"

    @property
    def is_text(self) -> bool:
        return self.type == "text" or bool(self.text)

    @property
    def words(self) -> str:
        return self.text or ""


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    """``arguments`` is JSON in a string."""

    name: str
    arguments: str


class CalledCustom(msgspec.Struct, frozen=True, kw_only=True):
    """``input`` is text."""

    name: str
    input: str


class MessageToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that an assistant made, of a ``function`` or of a ``custom`` tool."""

    id: str
    function: CalledFunction | msgspec.UnsetType = msgspec.UNSET
    custom: CalledCustom | msgspec.UnsetType = msgspec.UNSET
    type: Literal["function", "custom"] = "function"


class _AnyMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="role"):
    """``tool_calls`` belong to an assistant's message and ``tool_call_id`` to a tool's: they stand
    here so that they can be refused elsewhere."""

    name: str | None = None
    tool_calls: tuple[MessageToolCall, ...] | None = None
    tool_call_id: str | None = None

    @property
    def role(self) -> str:
        return str(self.__struct_config__.tag)


class UserMessage(_AnyMessage, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="user"):
    """What a user says. Fields of type Any are known but not honoured."""

    content: str | tuple[TextPart, ...] | None = None
    refusal: Any = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None


class SystemMessage(UserMessage, frozen=True, kw_only=True, tag="system"):
    """Instructions to the model."""


class DeveloperMessage(UserMessage, frozen=True, kw_only=True, tag="developer"):
    """The newer name of a system's message."""


class EchoedMessage(_AnyMessage, frozen=True, kw_only=True, tag="assistant"):
    """An earlier answer, sent back; null content is no text. ``reasoning_content`` and
    ``reasoning`` are its thoughts, by either name; a value that is not text is ignored as unknown
    fields are. ``refusal`` is the text of an answer that has neither content nor calls. ``audio``
    and ``function_call`` are refused where they are all that the answer has."""

    content: str | tuple[EchoedPart, ...] | None = None
    refusal: Any = None
    audio: Any = None
    function_call: Any = None
    reasoning_content: Any = None
    reasoning: Any = None


class ToolMessage(_AnyMessage, frozen=True, kw_only=True, tag="tool"):
    """The result of the call ``tool_call_id``; null is no text."""

    content: str | tuple[ToolPart, ...] | None = None


Message = UserMessage | SystemMessage | DeveloperMessage | EchoedMessage | ToolMessage

MESSAGE_OF_ROLE: Mapping[str, type[Message]] = {
    str(kind.__struct_config__.tag): kind
    for kind in (SystemMessage, DeveloperMessage, UserMessage, EchoedMessage, ToolMessage)
}
