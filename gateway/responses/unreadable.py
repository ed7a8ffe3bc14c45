"""Pictures and files in outputs of calls and in answers: sentences in their place, and notices."""

from __future__ import annotations

import msgspec

from millrace.registry.requests.message_fields import left_out_at
from millrace.schemas.chat.unreadable import UnreadPart
from millrace.schemas.notices import Notice
from millrace.schemas.responses.call_items import (
    CustomToolCallOutputItem,
    OtherItem,
    OutputPiece,
)


def left_out_of(item: object, where: str) -> list[Notice]:
    """Name each part of an item that the model does not read."""
    return [
        left_out_at(f"{where}.{field}[{i}]", part.kind)
        for field in ("output", "content")
        for i, part in enumerate(getattr(item, field, None) or ())
        if isinstance(part, UnreadPart)
    ]


def with_sentences(item: OtherItem) -> OtherItem:
    """The item as it is kept: with sentences in place of what the model does not read."""
    if not isinstance(item, CustomToolCallOutputItem) or isinstance(item.output, str):
        return item
    pieces = tuple(
        OutputPiece(piece.text) if isinstance(piece, UnreadPart) else piece for piece in item.output
    )
    return msgspec.structs.replace(item, output=pieces)
