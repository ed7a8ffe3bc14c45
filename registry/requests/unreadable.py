"""Pictures and other content in the history that no model here reads: a sentence in their place.

A user's picture is refused. A picture in a tool's result or in an answer comes back with every
later request, and its client cannot take it out: a refusal would end the conversation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from millrace.schemas.chat.messages import (
    EchoedMessage,
    EchoedPart,
    Message,
    ToolMessage,
    ToolPart,
)
from millrace.schemas.chat.unreadable import sentence_for
from millrace.schemas.notices import Notice, NoticeCode, Notices, notice


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
