"""Python literals as JSON, and back."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_TOKEN = re.compile(
    r"""(?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')"""
    r"|(?P<word>[A-Za-z0-9_.+-]+)|(?P<mark>[\[\](){},:])|[ \t\n\r]+|(?P<strange>.)",
    re.DOTALL,
)
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_MARKS = {"(": "[", ")": "]", ":": ": "}
_NO_JSON = "?"

_PLAIN = re.compile(r"""[^"'\\\x00-\x1f\x7f]*""")
_ESCAPED = {character: f"\\{character}" for character in '"\\/bfnrt'} | {
    "'": "'",
    "a": "\\u0007",
    "v": "\\u000b",
    "\n": "",
}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


class StringReader:
    """Reader of the inside of a string that begins with ``quote``; writes it as JSON as it arrives.

    ``ended`` is set by the closing quote. An escape is written when it is complete. A backslash
    that escapes nothing stands for itself.
    """

    def __init__(self, quote: str) -> None:
        self.ended = False
        self._quote = quote
        self._escape = ""

    def feed(self, text: str, at: int, made: list[str]) -> int:
        """Read ``text`` from ``at``. Return where the string ends in it, or its length."""
        while at < len(text) and not self.ended:
            if self._escape:
                at += self._read_escape(text[at], made)
                continue
            found = _PLAIN.match(text, at)
            assert found is not None
            made.append(found.group())
            at = found.end()
            if at < len(text):
                self._read_special(text[at], made)
                at += 1
        return at

    def _read_special(self, character: str, made: list[str]) -> None:
        if character == self._quote:
            self.ended = True
        elif character == "\\":
            self._escape = character
        else:
            made.append(_within_string(character))

    def _read_escape(self, character: str, made: list[str]) -> int:
        """Continue an escape. Return 1 if the character belongs to it, else 0."""
        escape = self._escape
        if len(escape) == 1:
            if character in _HEX_DIGITS:
                self._escape += character
                return 1
            self._escape = ""
            made.append(_ESCAPED.get(character, "\\\\"))
            return character in _ESCAPED
        if character not in "0123456789abcdefABCDEF":
            self._escape = ""
            made.append("\\" + escape)
            return 0
        escape += character
        is_whole = len(escape) == 2 + _HEX_DIGITS[escape[1]]
        self._escape = "" if is_whole else escape
        if is_whole:
            made.append(_character_of(escape))
        return 1


def as_json(literal: str) -> str:
    """Return a literal of Python or JSON as JSON; as a string if it is neither."""
    told = json_of(literal)
    return json.dumps(literal, ensure_ascii=False) if told is None else told


def json_of(literal: str) -> str | None:
    """Return a literal of Python or JSON as JSON; None if it is neither."""
    text = "".join(_tokens_as_json(literal))
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return None
    return text


def as_literal(value: Any) -> str:
    """Return a JSON value as a Python literal, with strings as in JSON."""
    if isinstance(value, dict):
        items = (f"{as_literal(key)}: {as_literal(inner)}" for key, inner in value.items())
        return "{" + ", ".join(items) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(as_literal(inner) for inner in value) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return repr(value)


def _tokens_as_json(literal: str) -> Iterator[str]:
    """Yield pieces of JSON; they form invalid JSON if ``literal`` is not a literal."""
    comma, follows_value = "", False
    for token in _TOKEN.finditer(literal):
        text, kind = token.group(), token.lastgroup
        if kind is None:
            continue
        if text == ",":
            yield comma
            comma, follows_value = ", ", False
            continue
        if kind == "mark":
            # A comma may precede the end of a list.
            yield ("" if text in ")]}" else comma) + _MARKS.get(text, text)
        elif follows_value:
            yield _NO_JSON
        elif kind == "string":
            yield comma + _string_as_json(text)
        else:
            yield comma + _word_as_json(text)
        comma, follows_value = "", kind != "mark"


def _word_as_json(word: str) -> str:
    if _NUMBER.fullmatch(word) or word in _CONSTANTS.values():
        return word
    return _CONSTANTS.get(word, _NO_JSON)


def _string_as_json(literal: str) -> str:
    made: list[str] = []
    StringReader(literal[0]).feed(literal, 1, made)
    return '"' + "".join(made) + '"'


def _character_of(escape: str) -> str:
    code = int(escape[len(r"\x") :], base=16)
    if escape[1] == "U":
        return _within_string(chr(code)) if code <= 0x10FFFF else "\\" + escape
    return f"\\u{code:04x}"


def _within_string(character: str) -> str:
    if 0xD800 <= ord(character) <= 0xDFFF:
        return f"\\u{ord(character):04x}"
    return json.dumps(character, ensure_ascii=False)[1:-1]
