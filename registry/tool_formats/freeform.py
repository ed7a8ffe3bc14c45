"""Freeform tools: their input is text instead of JSON.

The model knows such a tool as a function with one argument, ``input``, and calls it in its own
format. The client gets the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from millrace.schemas.tools import ToolDefinition, ToolFormat

INPUT = "input"
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}
# Formats with arguments written one by one, which need schemas that list them.
_ONE_BY_ONE = frozenset({ToolFormat.PYTHONIC, ToolFormat.QWEN3_CODER, ToolFormat.GLM45})
_OPEN: dict[str, Any] = {"type": "object", "additionalProperties": True}

_BEGINS = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_MAY_BEGIN = re.compile(
    r'\s*(?:\{\s*(?:"(?:i(?:n(?:p(?:u(?:t(?:"\s*(?::\s*"?)?)?)?)?)?)?)?)?)?', re.ASCII
)
_MAX_BEGIN_CHARACTERS = 64
_PLAIN = re.compile(r'[^"\\]+')
_SHORT_ESCAPES = dict(zip('"\\/bfnrt', '"\\/\b\f\n\r\t', strict=True))
_HEX = re.compile(r"[0-9a-fA-F]{4}")
_MAYBE_HEX = re.compile(r"[0-9a-fA-F]*")
_HIGH = range(0xD800, 0xDC00)
_LOW = range(0xDC00, 0xE000)
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class InputReader:
    """Reader of the input text in a call's arguments while they are being generated.

    Arguments that do not begin with ``{"input": "`` are the text themselves. The result depends
    only on the arguments, not on how they were cut.
    """

    def __init__(self) -> None:
        self._held = ""
        self._is_in = False
        self._is_raw = False
        self._is_over = False

    def feed(self, text: str) -> str:
        """Add a piece of the arguments, and return the next piece of the input text."""
        if self._is_over:
            return ""
        if self._is_raw:
            return text
        data = self._held + text
        if not self._is_in:
            begins = _BEGINS.match(data)
            if begins is None:
                if len(data) <= _MAX_BEGIN_CHARACTERS and _MAY_BEGIN.fullmatch(data):
                    self._held = data
                    return ""
                self._is_raw = True
                return data
            self._is_in = True
            data = data[begins.end() :]
        return self._unescaped(data)

    def _unescaped(self, data: str) -> str:
        """Return the unescaped continuation of a JSON string. An incomplete escape is held back."""
        told: list[str] = []
        at = 0
        self._held = ""
        while at < len(data):
            plain = _PLAIN.match(data, at)
            if plain is not None:
                told.append(plain.group())
                at = plain.end()
            elif data[at] == '"':
                self._is_over = True
                break
            else:
                character, size = _escaped(data, at)
                if not size:
                    self._held = data[at:]
                    break
                told.append(character)
                at += size
        return "".join(told)


def _escaped(data: str, at: int) -> tuple[str, int]:
    """Return the character of the escape at ``at``, and the escape's length; 0 if it is incomplete.
    An invalid escape stands for itself.
    """
    if at + 1 == len(data):
        return "", 0
    mark = data[at + 1]
    if mark != "u":
        return _SHORT_ESCAPES.get(mark, "\\" + mark), 2
    if not _HEX.fullmatch(data, at + 2, at + 6):
        is_whole = len(data) >= at + 6 or not _MAYBE_HEX.fullmatch(data, at + 2)
        return ("\\u", 2) if is_whole else ("", 0)
    code = int(data[at + 2 : at + 6], 16)
    if code in _LOW:
        return _REPLACEMENT, 6
    if code not in _HIGH:
        return chr(code), 6
    mark = data[at + 6 : at + 8]
    if len(data) < at + 12 and "\\u".startswith(mark):
        return "", 0
    if mark == "\\u" and _HEX.fullmatch(data, at + 8, at + 12):
        low = int(data[at + 8 : at + 12], 16)
        if low in _LOW:
            return chr(0x10000 + ((code - 0xD800) << 10) + low - 0xDC00), 12
    return _REPLACEMENT, 6


def input_of(arguments: str) -> str:
    """Return the text in the arguments of a whole call."""
    return InputReader().feed(arguments)


def arguments_of_input(text: str) -> str:
    """Return the arguments of a call with that text."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def held_to_patterns(
    tools: Sequence[ToolDefinition],
    patterns: Mapping[str, str],
    tool_format: ToolFormat,
    *,
    alone: bool,
) -> tuple[ToolDefinition, ...]:
    """Return the tools for a grammar.

    A tool whose input must match a regular expression in ``patterns`` becomes strict. If the
    grammar exists only for these (``alone``), the other tools accept any object as arguments, if
    the format can write it.
    """
    if not any(patterns.values()):
        return tuple(tools)
    alone = alone and not any(tool.strict for tool in tools)
    others_are_free = alone and tool_format not in _ONE_BY_ONE
    held = []
    for tool in tools:
        pattern = patterns.get(tool.name)
        if pattern:
            properties = {INPUT: {"type": "string", "pattern": pattern}}
            parameters = PARAMETERS | {"properties": properties}
            tool = msgspec.structs.replace(tool, parameters=parameters, strict=True)
        elif others_are_free:
            tool = msgspec.structs.replace(tool, parameters=_OPEN)
        held.append(tool)
    return tuple(held)
