"""Scanner of calls in Python's syntax, ``[f(a=1, b="x"), g()]``."""

from __future__ import annotations

import json
import re

from millrace.registry.tool_formats.python_literals import StringReader, as_json
from millrace.registry.tool_formats.scanners.base import (
    MAX_WORD_CHARACTERS,
    NO_ARGUMENTS,
    Reading,
    Scanner,
    ScanStatus,
    UnfitError,
)

_KEY = re.compile(r"[\w-]*")
# Characters that may end a literal, or hide such an end.
_IN_LITERAL = re.compile(r"""["'(\[{)\]},]""")
_CLOSERS = {"(": ")", "[": "]", "{": "}"}


class PythonScanner(Scanner):
    """Scanner of one call of a list; the list's ``[`` precedes the ``first`` call.

    The call is certain with ``f()`` or ``f(a=``. Its arguments are returned as JSON: strings as
    they arrive, other values when they are complete. A value that is not a literal becomes a
    string. A value without a name is skipped.
    """

    def __init__(self, *, first: bool) -> None:
        super().__init__()
        self._is_first = first
        self._num_keys = 0

    def _read(self) -> Reading[ScanStatus]:
        if self._is_first:
            yield from self._expect("[")
            yield from self._behind_blanks()
        self.name = yield from self._word()
        if self._text[self._at] != "(":
            raise UnfitError
        separator = "("
        while separator in "(,":
            self._at += 1
            if (yield from self._behind_blanks()) == ")":
                break
            yield from self._argument()
            while (separator := (yield from self._behind_blanks())) not in ",)]}":
                yield from self._literal()
        self.certain = True
        self._at += self._text[self._at] == ")"
        self._arguments.append("}" if self._num_keys else NO_ARGUMENTS)
        return ScanStatus.ENDED

    def _argument(self) -> Reading[None]:
        """Read a key and its value. Skip text that is neither, up to the end of an argument."""
        key = yield from self._run(_KEY, MAX_WORD_CHARACTERS)
        is_word = len(key) <= MAX_WORD_CHARACTERS
        if not is_word or (yield from self._behind_blanks()) != "=" or not key:
            if not self.certain:
                raise UnfitError
            yield from self._literal()
            return
        self.certain = True
        quoted = json.dumps(key, ensure_ascii=False)
        self._arguments.append(f"{', ' if self._num_keys else '{'}{quoted}: ")
        self._num_keys += 1
        self._at += 1
        quote = yield from self._behind_blanks()
        if quote not in "\"'":
            literal = yield from self._literal()
            self._arguments.append(as_json(literal.strip()))
            return
        self._arguments.append('"')
        self._at += 1
        string = StringReader(quote)
        while True:
            self._at = string.feed(self._text, self._at, self._arguments)
            if string.ended:
                break
            yield
        self._arguments.append('"')

    def _literal(self) -> Reading[str]:
        """Read and return the text before the end of a value."""
        literal: list[str] = []
        closers: list[str] = []
        self._pass_into(literal)
        while True:
            mark = _IN_LITERAL.search(self._text, self._at)
            if mark is None:
                self._at = len(self._text)
                yield
                continue
            self._at = mark.start()
            character = mark.group()
            if not closers and character in ",)]}":
                self._pass_into(None)
                return "".join(literal)
            self._at += 1
            if character in "\"'":
                yield from self._string(character)
            elif character in _CLOSERS:
                closers.append(_CLOSERS[character])
            elif character != ",":
                closers.pop()
