"""Normalised items of a Responses request, as they are stored and returned."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence

import msgspec

from millrace.registry.requests.message_fields import left_out_at
from millrace.schemas.chat.unreadable import UnreadPart
from millrace.schemas.errors import ParameterError
from millrace.schemas.notices import Notice
from millrace.schemas.responses.call_items import (
    AdditionalToolsItem,
    ApplyPatchCallItem,
    ApplyPatchCallOutputItem,
    CustomToolCallItem,
    CustomToolCallOutputItem,
    LocalShellCallItem,
    LocalShellCallOutputItem,
    OtherItem,
    OutputPiece,
    ShellCallItem,
    ShellCallOutputItem,
    ToolSearchCallItem,
    ToolSearchOutputItem,
)
from millrace.schemas.responses.items import (
    Content,
    EchoedRefusal,
    EchoedText,
    FunctionCallItem,
    FunctionCallOutputItem,
    GivenAgentMessage,
    GivenCall,
    GivenCallOutput,
    GivenMessage,
    GivenReasoning,
    InputText,
    Item,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
)

ID_PREFIXES: Mapping[type[Item], str] = {
    MessageItem: "msg",
    ReasoningItem: "rs",
    FunctionCallItem: "fc",
    FunctionCallOutputItem: "fco",
    CustomToolCallItem: "ctc",
    CustomToolCallOutputItem: "ctco",
    LocalShellCallItem: "lsh",
    LocalShellCallOutputItem: "lsho",
    ShellCallItem: "sh",
    ShellCallOutputItem: "sho",
    ApplyPatchCallItem: "apc",
    ApplyPatchCallOutputItem: "apco",
    ToolSearchCallItem: "tsc",
    ToolSearchOutputItem: "tso",
    AdditionalToolsItem: "at",
}
# Value of ``include`` that requests sealed thoughts.
THOUGHTS = "reasoning.encrypted_content"
_MARK = "millrace1."


def sealed(text: str) -> str:
    """Encode thoughts in the form that ``opened`` reads."""
    return _MARK + base64.urlsafe_b64encode(text.encode(errors="replace")).decode()


def opened(content: str) -> str | None:
    """Return the thoughts that ``sealed`` wrote; None for content of another server."""
    if not content.startswith(_MARK):
        return None
    try:
        return base64.b64decode(content.removeprefix(_MARK), b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        return None


def left_out_of(item: object, where: str) -> list[Notice]:
    """Return a notice for each part of an item that the model does not read."""
    return [
        left_out_at(f"{where}.{field}[{i}]", part.kind)
        for field in ("output", "content")
        for i, part in enumerate(getattr(item, field, None) or ())
        if isinstance(part, UnreadPart)
    ]


def with_sentences(item: OtherItem) -> OtherItem:
    """Return the item to store: with sentences in place of content that the model does not read."""
    if not isinstance(item, CustomToolCallOutputItem) or isinstance(item.output, str):
        return item
    pieces = tuple(
        OutputPiece(piece.text) if isinstance(piece, UnreadPart) else piece for piece in item.output
    )
    return msgspec.structs.replace(item, output=pieces)


def said(text: str) -> MessageItem:
    """Return the message of a user."""
    return MessageItem(id="", role="user", content=(InputText(text),))


def normalised(
    given: GivenMessage | GivenReasoning | GivenCall | GivenCallOutput | GivenAgentMessage,
) -> Item:
    """Return the item to store. Raises ParameterError for a field that is not honoured."""
    if getattr(given, "phase", None) is not None:
        raise ParameterError("phase", "phase is not supported; leave it out.")
    status = given.status or "completed"
    if isinstance(given, GivenReasoning):
        content = tuple(ReasoningText(part.text) for part in given.content or ())
        if not content and given.encrypted_content:
            content = (ReasoningText(opened(given.encrypted_content) or ""),)
        return ReasoningItem(id=given.id or "", content=content, status=status)
    if isinstance(given, GivenAgentMessage):
        text = "".join(part.text for part in given.content)
        told = said(f"{given.author} to {given.recipient}: {text}")
        return msgspec.structs.replace(told, id=given.id or "")
    if isinstance(given, GivenCall):
        return FunctionCallItem(
            id=given.id or "",
            call_id=given.call_id,
            name=given.name,
            arguments=given.arguments,
            status=status,
            namespace=given.namespace or msgspec.UNSET,
        )
    if isinstance(given, GivenCallOutput):
        output = given.output or ""
        return FunctionCallOutputItem(
            id=given.id or "",
            call_id=given.call_id,
            output=output if isinstance(output, str) else "".join(part.text for part in output),
            status=status,
        )
    return MessageItem(id=given.id or "", role=given.role, content=_content(given), status=status)


def _content(given: GivenMessage) -> tuple[Content, ...]:
    content = given.content or ""
    if isinstance(content, str):
        return (OutputText(content) if given.role == "assistant" else InputText(content),)
    return tuple(map(_piece, content))


def _piece(part: InputText | EchoedText | EchoedRefusal | UnreadPart) -> Content:
    if isinstance(part, UnreadPart):
        return OutputText(part.text)
    if isinstance(part, EchoedRefusal):
        return OutputText(part.refusal)
    return OutputText(part.text, logprobs=part.logprobs) if isinstance(part, EchoedText) else part


def named(items: Sequence[Item], stem: str, earlier: Sequence[Item]) -> tuple[Item, ...]:
    """Return ``items``, each with an id that is unique among them and ``earlier``."""
    taken = {item.id for item in earlier}
    result: list[Item] = []
    for number, item in enumerate(items):
        if not item.id or item.id in taken:
            new_id = f"{ID_PREFIXES[type(item)]}_{stem}_in{number}"
            item = msgspec.structs.replace(item, id=new_id)
        taken.add(item.id)
        result.append(item)
    return tuple(result)
