"""Parsed form of a text."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from millrace.registry.tool_formats import ArgumentsPiece, CallPiece, ContentPiece, ToolCallParser
from millrace.schemas.tools import ToolDefinition, ToolFormat


def read(
    tool_format: ToolFormat, text: str, tools: Sequence[ToolDefinition] = ()
) -> tuple[str, list[tuple[str, str]]]:
    """Return content, and names and arguments of calls. Assert that the text gives the same as a
    whole and in single characters."""
    whole, cut = _read(tool_format, [text], tools), _read(tool_format, list(text), tools)
    assert whole == cut
    return whole


def _read(
    tool_format: ToolFormat, chunks: list[str], tools: Sequence[ToolDefinition]
) -> tuple[str, list[tuple[str, str]]]:
    numbers = itertools.count()
    parser = ToolCallParser(tool_format, lambda: str(next(numbers)), tools)
    pieces = [piece for chunk in chunks for piece in parser.push(chunk)]
    content, calls = "", list[tuple[str, str]]()
    for piece in [*pieces, *parser.finish()]:
        match piece:
            case ContentPiece(text):
                content += text
            case CallPiece(_, _, name):
                calls.append((name, ""))
            case ArgumentsPiece(_, text):
                calls[-1] = calls[-1][0], calls[-1][1] + text
    return content, calls
