"""One call, ``{"name": …, "arguments": …}``, followed while it is being written."""

from __future__ import annotations

import json
import re

from millrace.registry.tool_formats.scanners.base import (
    MAX_WORD_CHARACTERS,
    NO_ARGUMENTS,
    ScanStatus,
    run,
    skip_blanks,
)
from millrace.registry.tool_formats.scanners.json_arguments import JsonScanner

_ARGUMENTS = ("arguments", "parameters")
_KEYS = frozenset({"name", "type", "id", *_ARGUMENTS})
_MAX_SIDE_VALUE_CHARACTERS = 256
_WORD = re.compile(r"[A-Za-z0-9_-]*")
_SCALAR = re.compile(r"[A-Za-z0-9.+-]*")


class CallScanner(JsonScanner):
    """The keys may come in any order, ``type`` and ``id`` among them; anything else is no call. It
    is certain once the name is known and the arguments' ``{`` is there.
    """

    def __init__(self, closing_tag: str) -> None:
        super().__init__(closing_tag)
        self._seen: set[str] = set()
        self._key = ""
        self._raw: list[str] = []
        self._num_raw = 0

    def _opening(self, text: str, at: int) -> int:
        return self._expect(text, at, "{", self._before_key)

    def _before_key(self, text: str, at: int) -> int:
        self._word = ""
        return self._expect(text, at, '"', self._in_key)

    def _in_key(self, text: str, at: int) -> int:
        at, complete = self._read_word(text, at)
        if complete:
            self._key = "arguments" if self._word in _ARGUMENTS else self._word
            if self._word not in _KEYS or self._key in self._seen:
                return self._fail(at)
            self._seen.add(self._key)
            self._step = self._before_colon
        return at

    def _before_colon(self, text: str, at: int) -> int:
        return self._expect(text, at, ":", self._before_value)

    def _before_value(self, text: str, at: int) -> int:
        at = skip_blanks(text, at)
        if at == len(text):
            return at
        first = text[at]
        self._word = ""
        self._raw.clear()
        self._num_raw = 0
        if self._key == "name":
            return self._expect(text, at, '"', self._in_name)
        if self._key == "arguments" and first == "{":
            self.certain = bool(self.name)
            self._step = self._in_arguments
            return at
        if first == '"':
            self._quoted = True
            self._step = self._in_string
            return at + 1
        self._step = self._in_scalar
        return at

    def _in_name(self, text: str, at: int) -> int:
        at, complete = self._read_word(text, at)
        if complete:
            if not self._word:
                return self._fail(at)
            self.name = self._word
            self._step = self._after_value
        return at

    def _in_scalar(self, text: str, at: int) -> int:
        at, found = run(_SCALAR, text, at)
        self._word += found
        if len(self._word) > MAX_WORD_CHARACTERS:
            return self._fail(at)
        if at < len(text):
            if not self._word or (self._key == "arguments" and self._word != "null"):
                return self._fail(at)
            self._step = self._after_value
        return at

    def _in_string(self, text: str, at: int) -> int:
        """A value beside the call, or arguments that were written as JSON within a string."""
        end = self._through_string(text, at)
        self._raw.append(text[at:end])
        self._num_raw += end - at
        if self._key != "arguments":
            beyond = self._num_raw - _MAX_SIDE_VALUE_CHARACTERS
            if beyond > 0:
                return self._fail(end - beyond)
        elif not self._quoted:
            arguments = _unquoted('"' + "".join(self._raw))
            if arguments is None:
                return self._fail(end)
            self._arguments.append(arguments)
        if not self._quoted:
            self._step = self._after_value
        return end

    def _after_value(self, text: str, at: int) -> int:
        at = skip_blanks(text, at)
        if at == len(text):
            return at
        if text[at] == "," and not self.certain:
            self._step = self._before_key
            return at + 1
        if text[at] == "}" and self.name:
            if not self.certain and not self._arguments:
                self._arguments.append(NO_ARGUMENTS)
            self.certain = True
            self.status = ScanStatus.ENDED
            return at + 1
        return self._fail(at)

    def _after_arguments(self, text: str, at: int) -> int:
        return self._after_value(text, at)

    def _read_word(self, text: str, at: int) -> tuple[int, bool]:
        """Go on with a word; where it ends here, and whether its closing quote has come."""
        at, found = run(_WORD, text, at)
        self._word += found
        if len(self._word) > MAX_WORD_CHARACTERS or (at < len(text) and text[at] != '"'):
            return self._fail(at), False
        return (at + 1, True) if at < len(text) else (at, False)


def _unquoted(literal: str) -> str | None:
    """The JSON object within a JSON string, if there is one."""
    try:
        text = json.loads(literal, strict=False)
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    return text if isinstance(value, dict) else None
