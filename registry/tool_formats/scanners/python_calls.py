"""Calls written as Python writes them, ``[f(a=1, b="x"), g()]``."""

from __future__ import annotations

import json
import re

from millrace.registry.tool_formats.python_literals import StringReader, as_json
from millrace.registry.tool_formats.scanners.base import (
    MAX_WORD_CHARACTERS,
    NO_ARGUMENTS,
    Scanner,
    ScanStatus,
    run,
    skip_blanks,
)

_KEY = re.compile(r"[\w-]*")
# What a literal may end at, or what may hide such an end.
_IN_LITERAL = re.compile(r"""["'(\[{)\]},]""")
_CLOSERS = {"(": ")", "[": "]", "{": "}"}


class PythonScanner(Scanner):
    """One call of a list; the list's ``[`` comes before it if it is the ``first``.

    It is certain by ``f()`` or ``f(a=``. Its arguments are told in JSON: strings as they come,
    other values when they are whole. A value that is no literal is a string, and what has no name
    is passed over.
    """

    def __init__(self, *, first: bool) -> None:
        super().__init__()
        if not first:
            self._step = self._in_name
        self._num_keys = 0
        self._string = StringReader("")
        self._literal: list[str] = []
        self._is_dropped = False
        self._mark = ""

    def _opening(self, text: str, at: int) -> int:
        return self._expect(text, at, "[", self._before_name)

    def _before_name(self, text: str, at: int) -> int:
        at = skip_blanks(text, at)
        self._step = self._in_name
        return at

    def _in_name(self, text: str, at: int) -> int:
        at, complete = self._read_name(text, at)
        if not complete:
            return at
        if text[at] != "(":
            return self._fail(at)
        self.name = self._word
        self._step = self._before_first_key
        return at + 1

    def _before_first_key(self, text: str, at: int) -> int:
        at = skip_blanks(text, at)
        if at < len(text) and text[at] == ")":
            self.certain = True
            self._arguments.append(NO_ARGUMENTS)
            self.status = ScanStatus.ENDED
            return at + 1
        return self._begin_key(text, at)

    def _begin_key(self, text: str, at: int) -> int:
        at = skip_blanks(text, at)
        if at < len(text):
            self._word = ""
            self._step = self._in_key
        return at

    def _in_key(self, text: str, at: int) -> int:
        at, found = run(_KEY, text, at)
        self._word += found
        if len(self._word) > MAX_WORD_CHARACTERS:
            return self._drop(at)
        if at < len(text):
            self._step = self._behind_key
        return at

    def _behind_key(self, text: str, at: int) -> int:
        at = skip_blanks(text, at)
        if at == len(text):
            return at
        if text[at] != "=" or not self._word:
            return self._drop(at)
        self.certain = True
        key = json.dumps(self._word, ensure_ascii=False)
        self._arguments.append(f"{', ' if self._num_keys else '{'}{key}: ")
        self._num_keys += 1
        self._step = self._before_value
        return at + 1

    def _before_value(self, text: str, at: int) -> int:
        at = skip_blanks(text, at)
        if at == len(text):
            return at
        if text[at] in "\"'":
            self._string = StringReader(text[at])
            self._arguments.append('"')
            self._step = self._in_string
            return at + 1
        self._literal.clear()
        self._is_dropped = False
        self._step = self._in_literal
        return at

    def _drop(self, at: int) -> int:
        """Pass over what is no argument, as far as an argument would go."""
        if not self.certain:
            return self._fail(at)
        self._is_dropped = True
        self._step = self._in_literal
        return at

    def _in_string(self, text: str, at: int) -> int:
        at = self._string.feed(text, at, self._arguments)
        if self._string.ended:
            self._arguments.append('"')
            self._step = self._behind_value
        return at

    def _in_literal(self, text: str, at: int) -> int:
        begin = at
        while at < len(text):
            if self._quoted:
                at = self._through_quotes(text, at)
                continue
            mark = _IN_LITERAL.search(text, at)
            if mark is None:
                at = len(text)
                break
            at = mark.start()
            if not self._closers and mark.group() in ",)]}":
                self._literal.append(text[begin:at])
                if not self._is_dropped:
                    self._arguments.append(as_json("".join(self._literal).strip()))
                self._step = self._behind_value
                return at
            at += 1
            self._note(mark.group())
        self._literal.append(text[begin:at])
        return at

    def _note(self, mark: str) -> None:
        if mark in "\"'":
            self._quoted = True
            self._mark = mark
        elif mark in _CLOSERS:
            self._closers.append(_CLOSERS[mark])
        elif mark != ",":
            self._closers.pop()

    def _through_quotes(self, text: str, at: int) -> int:
        while at < len(text):
            character = text[at]
            at += 1
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == self._mark:
                self._quoted = False
                break
        return at

    def _behind_value(self, text: str, at: int) -> int:
        at = skip_blanks(text, at)
        if at == len(text):
            return at
        if text[at] == ",":
            self._step = self._before_next_key
            return at + 1
        if text[at] in ")]}":
            return self._end(at + (text[at] == ")"))
        return self._drop(at)

    def _before_next_key(self, text: str, at: int) -> int:
        at = skip_blanks(text, at)
        if at < len(text) and text[at] == ")":
            return self._end(at + 1)
        return self._begin_key(text, at)

    def _end(self, at: int) -> int:
        """The call is over, by its bracket or by what does not belong to it."""
        self._arguments.append("}")
        self.status = ScanStatus.ENDED
        return at
