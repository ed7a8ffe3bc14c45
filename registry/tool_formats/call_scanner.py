"""One call, ``{"name": …, "arguments": …}``, followed while it is being written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from enum import Enum, auto

BLANKS = " \t\n\r"
NO_ARGUMENTS = "{}"

_ARGUMENTS = ("arguments", "parameters")
_KEYS = frozenset({"name", "type", "id", *_ARGUMENTS})
_MAX_WORD_CHARACTERS = 64
_MAX_SIDE_VALUE_CHARACTERS = 256
_NOT_BLANK = re.compile(r"[^ \t\n\r]")
_WORD = re.compile(r"[A-Za-z0-9_-]*")
_SCALAR = re.compile(r"[A-Za-z0-9.+-]*")
_IN_STRING = re.compile(r'["\\]')
# "<" is nowhere in JSON but in strings: it begins the tag that should have come later.
_IN_OBJECT = re.compile(r'["{}\[\]<]')
_CLOSERS = {"{": "}", "[": "]"}


class Status(Enum):
    """OPEN: more is to come. ENDED: the call is there. CLOSED: so is the tag behind it. FAILED:
    this is no call."""

    OPEN = auto()
    ENDED = auto()
    CLOSED = auto()
    FAILED = auto()


class CallScanner:
    """Follows a text from where a call may begin.

    The keys may come in any order, ``type`` and ``id`` among them; anything else is no call. Once
    the name is known and the arguments' ``{`` is there the call is ``certain``: it stands then,
    whatever follows, and its arguments can be taken as they come. What stops being JSON in them
    belongs to them up to ``closing_tag`` (or to the end, if that is empty).

    The state after a text does not depend on how it was cut.
    """

    def __init__(self, closing_tag: str) -> None:
        self.status = Status.OPEN
        self.certain = False
        self.name = ""
        self._closing_tag = closing_tag
        self._step: Callable[[str, int], int] = self._opening
        self._seen: set[str] = set()
        self._key = ""
        self._word = ""
        self._raw: list[str] = []
        self._num_raw = 0
        self._escaped = False
        self._quoted = False
        self._closers: list[str] = []
        self._arguments: list[str] = []
        self._tail = ""

    def feed(self, text: str) -> int:
        """Go on by ``text``; how many of its characters belong here (all, while OPEN)."""
        at = 0
        while at < len(text) and self.status is Status.OPEN:
            at = self._step(text, at)
        return at

    def take_arguments(self) -> str:
        """The arguments that have come since the last time; nothing before it is ``certain``."""
        if not self.certain:
            return ""
        taken = "".join(self._arguments)
        self._arguments.clear()
        return taken

    def finish(self) -> None:
        """No more text comes: what was kept back as a part of the tag belongs to the arguments."""
        self._arguments.append(self._tail)
        self._tail = ""

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
        at = _skip_blanks(text, at)
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
        at, run = _run(_SCALAR, text, at)
        self._word += run
        if len(self._word) > _MAX_WORD_CHARACTERS:
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

    def _in_arguments(self, text: str, at: int) -> int:
        begin = at
        while at < len(text):
            if self._quoted:
                at = self._through_string(text, at)
                continue
            mark = _IN_OBJECT.search(text, at)
            if mark is None:
                at = len(text)
                break
            at = mark.end()
            character = mark.group()
            if character == '"':
                self._quoted = True
            elif character in _CLOSERS:
                self._closers.append(_CLOSERS[character])
            elif character != self._closers[-1]:
                at = mark.start()
                if not self.certain:
                    return self._fail(at)
                self._step = self._in_malformed
                break
            else:
                self._closers.pop()
                if not self._closers:
                    self._step = self._after_value
                    break
        self._arguments.append(text[begin:at])
        return at

    def _in_malformed(self, text: str, at: int) -> int:
        if not self._closing_tag:
            self._arguments.append(text[at:])
            return len(text)
        data = self._tail + text[at:]
        end = data.find(self._closing_tag)
        if end >= 0:
            self._arguments.append(data[:end])
            self.status = Status.CLOSED
            at += end + len(self._closing_tag) - len(self._tail)
            self._tail = ""
            return at
        cut = start_of_partial(data, self._closing_tag)
        self._arguments.append(data[:cut])
        self._tail = data[cut:]
        return len(text)

    def _after_value(self, text: str, at: int) -> int:
        at = _skip_blanks(text, at)
        if at == len(text):
            return at
        if text[at] == "," and not self.certain:
            self._step = self._before_key
            return at + 1
        if text[at] == "}" and self.name:
            if not self.certain and not self._arguments:
                self._arguments.append(NO_ARGUMENTS)
            self.certain = True
            self.status = Status.ENDED
            return at + 1
        return self._fail(at)

    def _expect(self, text: str, at: int, character: str, then: Callable[[str, int], int]) -> int:
        at = _skip_blanks(text, at)
        if at == len(text):
            return at
        if text[at] != character:
            return self._fail(at)
        self._step = then
        return at + 1

    def _read_word(self, text: str, at: int) -> tuple[int, bool]:
        """Go on with a word; where it ends here, and whether its closing quote has come."""
        at, run = _run(_WORD, text, at)
        self._word += run
        if len(self._word) > _MAX_WORD_CHARACTERS or (at < len(text) and text[at] != '"'):
            return self._fail(at), False
        return (at + 1, True) if at < len(text) else (at, False)

    def _through_string(self, text: str, at: int) -> int:
        """Where the string that we are in ends here; then we are in it no more."""
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            mark = _IN_STRING.search(text, at)
            if mark is None:
                return len(text)
            at = mark.end()
            if mark.group() == '"':
                self._quoted = False
                return at
            self._escaped = True
        return at

    def _fail(self, at: int) -> int:
        self.status = Status.ENDED if self.certain else Status.FAILED
        return at


def start_of_partial(text: str, tag: str) -> int:
    """Where the end of ``text`` may be the beginning of ``tag``; its length if nowhere."""
    at = text.find(tag[0], max(0, len(text) - len(tag) + 1))
    while at >= 0:
        if tag.startswith(text[at:]):
            return at
        at = text.find(tag[0], at + 1)
    return len(text)


def _skip_blanks(text: str, at: int) -> int:
    found = _NOT_BLANK.search(text, at)
    return len(text) if found is None else found.start()


def _run(pattern: re.Pattern[str], text: str, at: int) -> tuple[int, str]:
    found = pattern.match(text, at)
    assert found is not None
    return found.end(), found.group()


def _unquoted(literal: str) -> str | None:
    """The JSON object within a JSON string, if there is one."""
    try:
        text = json.loads(literal, strict=False)
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    return text if isinstance(value, dict) else None
