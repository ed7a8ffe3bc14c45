"""Text of content blocks for the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from millrace.registry.requests.message_fields import left_out_at
from millrace.schemas.anthropic.blocks import (
    BrowserStateBlock,
    DocumentBlock,
    ImageBlock,
    ReadableBlock,
    SearchResultBlock,
    TextBlock,
    ToolReferenceBlock,
)
from millrace.schemas.chat.unreadable import sentence_for
from millrace.schemas.errors import ParameterError
from millrace.schemas.notices import Notice

_ENCRYPTED = "encrypted"
_HINTS = ("cache_control", "citations")


def text_of(
    blocks: Sequence[tuple[str, ReadableBlock | ImageBlock]], notices: list[Notice] | None = None
) -> str:
    """Return the text of blocks, each given with its path. Blocks other than text are on lines of
    their own.

    With ``notices``, images and other unreadable content become a sentence and a notice. Without, a
    document with such content raises ParameterError.
    """
    texts = [_text_of(where, block, notices) for where, block in blocks]
    is_text = all(isinstance(block, TextBlock) for _, block in blocks)
    return ("" if is_text else "\n").join(texts)


def result_text(content: Any) -> tuple[str, tuple[str, ...]]:
    """Return the text of a result of a provider's server tool, and the names of the fields that are
    left out of it because only the provider can read them."""
    if content is None or isinstance(content, str):
        return content or "", ()
    if isinstance(content, list) and all(_is_text(block) for block in content):
        return "".join([block["text"] for block in content]), ()
    left_out: dict[str, None] = {}
    readable = _without_unreadable(content, left_out)
    return msgspec.json.encode(readable).decode(), tuple(left_out)


def _text_of(where: str, block: ReadableBlock | ImageBlock, notices: list[Notice] | None) -> str:
    if isinstance(block, TextBlock):
        return block.text
    if isinstance(block, ImageBlock):
        return _left_out(where, block.type, notices)
    if isinstance(block, SearchResultBlock):
        return "\n".join([block.title, block.source, *(part.text for part in block.content)])
    if isinstance(block, DocumentBlock):
        heads = [head for head in (block.title, block.context) if head]
        return "\n".join([*heads, _document_text(where, block, notices)])
    if isinstance(block, ToolReferenceBlock):
        return f"The tool {block.tool_name} was found."
    assert isinstance(block, BrowserStateBlock)
    return msgspec.json.encode(block).decode()


def _document_text(where: str, block: DocumentBlock, notices: list[Notice] | None) -> str:
    source = block.source
    kind = source.get("type")
    content = source.get("data") if kind == "text" else source.get("content")
    if kind in ("text", "content"):
        if isinstance(content, str):
            return content
        if isinstance(content, list) and all(_is_text(part) for part in content):
            return "".join([part["text"] for part in content])
        if isinstance(content, list) and notices is not None:
            texts = [
                part["text"]
                if _is_text(part)
                else _left_out(f"{where}.source.content[{i}]", _type_of(part), notices)
                for i, part in enumerate(content)
            ]
            return "\n".join(texts)
    if notices is not None:
        return _left_out(where, block.type, notices)
    raise ParameterError(
        f"{where}.source",
        f"{where}.source: documents must be text, with the source type text or content, "
        f"not {kind!r:.100}.",
    )


def _left_out(where: str, kind: str, notices: list[Notice] | None) -> str:
    """Return the sentence in place of unreadable content. A user's image is refused before."""
    if notices is not None:
        notices.append(left_out_at(where, kind))
    return sentence_for(kind)


def _type_of(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    return kind if isinstance(kind, str) else "content"


def _is_text(block: Any) -> bool:
    return (
        isinstance(block, dict)
        and block.get("type") == "text"
        and isinstance(block.get("text"), str)
    )


def _without_unreadable(value: Any, left_out: dict[str, None]) -> Any:
    if isinstance(value, list):
        return [_without_unreadable(one, left_out) for one in value]
    if not isinstance(value, dict):
        return value
    readable = {}
    is_base64 = value.get("type") == "base64"
    for name, one in value.items():
        if name.startswith(_ENCRYPTED) or (is_base64 and name == "data"):
            left_out[name] = None
        elif name not in _HINTS:
            readable[name] = _without_unreadable(one, left_out)
    return readable
