"""Calls whose arguments stand between tags, each by itself, as plain text."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Mapping

from millrace.registry.tool_formats.argument_types import ArgumentTypes
from millrace.registry.tool_formats.scanners.base import (
    Scanner,
    ScanStatus,
    Step,
    run,
    skip_blanks,
    start_of_partial,
)

OPENING_TAG, CLOSING_TAG = "<tool_call>", "</tool_call>"
FUNCTION_TAG, FUNCTION_END = "<function=", "</function>"
PARAMETER_TAG, PARAMETER_END = "<parameter=", "</parameter>"
KEY_TAG, KEY_END = "<arg_key>", "</arg_key>"
VALUE_TAG, VALUE_END = "<arg_value>", "</arg_value>"

_MAX_KEY_CHARACTERS = 128
_KEY = re.compile(r"[^<>\n]*")


class XmlScanner(Scanner):
    """What all have in common. Arguments are told in JSON: text as it comes, others when they are
    whole. A value ends at ``value_end``; a line break at its beginning and end is none of it if
    values stand on ``lines`` of their own."""

    def __init__(self, types: ArgumentTypes, value_end: str, *, lines: bool) -> None:
        super().__init__()
        self._types = types
        self._value_end = value_end
        self._lines = lines
        self._num_keys = 0
        self._key = ""
        self._is_text = False
        self._value: list[str] = []
        self._tail = ""

    def _read_one_of(self, text: str, at: int, tags: Mapping[str, Step]) -> int:
        """Go on with one of several tags, of which ``_word`` is what has come."""
        while at < len(text):
            word = self._word + text[at]
            if not any(tag.startswith(word) for tag in tags):
                return self._end(at)
            self._word = word
            at += 1
            if word in tags:
                self._word = ""
                self._step = tags[word]
                break
        return at

    def _read_key(self, text: str, at: int) -> tuple[int, bool]:
        """Go on with the name of an argument; where it ends here, and whether it does."""
        at, found = run(_KEY, text, at)
        self._word += found
        if at == len(text):
            return at, False
        self._key, self._word = self._word.strip(), ""
        if not 0 < len(self._key) <= _MAX_KEY_CHARACTERS:
            return self._end(at), False
        return at, True

    def _begin_value(self) -> None:
        quoted = json.dumps(self._key, ensure_ascii=False)
        self._arguments.append(f"{', ' if self._num_keys else ''}{quoted}: ")
        self._num_keys += 1
        self._is_text = self._types.is_text(self.name, self._key)
        if self._is_text:
            self._arguments.append('"')
        self._value.clear()
        self._tail = ""
        self._step = self._before_value if self._lines else self._in_value

    def _before_value(self, text: str, at: int) -> int:
        self._step = self._in_value
        return at + (text[at] == "\n")

    def _in_value(self, text: str, at: int) -> int:
        data = self._tail + text[at:]
        end = data.find(self._value_end)
        if end >= 0:
            at += end + len(self._value_end) - len(self._tail)
            self._tail = ""
            self._take(data[: end - (self._lines and data[:end].endswith("\n"))])
            self._end_value()
            return at
        cut = start_of_partial(data, self._value_end)
        if self._lines and data[:cut].endswith("\n"):
            cut -= 1
        self._take(data[:cut])
        self._tail = data[cut:]
        return len(text)

    def _take(self, text: str) -> None:
        if self._is_text:
            self._arguments.append(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._value.append(text)

    def _end_value(self) -> None:
        if self._is_text:
            self._arguments.append('"')
        else:
            value = "".join(self._value)
            self._arguments.append(self._types.as_json(self.name, self._key, value))
        self._step = self._before_key

    def _begin_arguments(self) -> None:
        """The call is certain: its object of arguments begins, unless it has begun."""
        if not self.certain:
            self.certain = True
            self._arguments.append("{")

    @abstractmethod
    def _before_key(self, text: str, at: int) -> int:
        """The step before each argument, and behind the last one."""

    def _close(self, status: ScanStatus) -> None:
        self._begin_arguments()
        self._arguments.append("}")
        self.status = status

    def _end(self, at: int) -> int:
        """What comes here does not belong to a call."""
        if not self.certain:
            return self._fail(at)
        self._close(ScanStatus.ENDED)
        return at


class QwenScanner(XmlScanner):
    """``<function=name><parameter=key>value</parameter></function>``, behind ``<tool_call>``. It is
    certain once the name is there."""

    def __init__(self, types: ArgumentTypes) -> None:
        super().__init__(types, PARAMETER_END, lines=True)

    def _opening(self, text: str, at: int) -> int:
        at = skip_blanks(text, at)
        if at < len(text):
            self._step = self._in_function_tag
        return at

    def _in_function_tag(self, text: str, at: int) -> int:
        return self._read_tag(text, at, FUNCTION_TAG, self._in_name)

    def _in_name(self, text: str, at: int) -> int:
        at, complete = self._read_name(text, at)
        if not complete:
            return at
        if text[at] != ">":
            return self._fail(at)
        self.name, self._word = self._word, ""
        self._begin_arguments()
        self._step = self._before_key
        return at + 1

    def _before_key(self, text: str, at: int) -> int:
        at = skip_blanks(text, at)
        if at < len(text):
            self._step = self._in_tag
        return at

    def _in_tag(self, text: str, at: int) -> int:
        tags = {
            PARAMETER_TAG: self._in_key,
            FUNCTION_END: self._ended,
            CLOSING_TAG: self._closed,
        }
        at = self._read_one_of(text, at, tags)
        if self._step in (self._ended, self._closed):
            self._step(text, at)
        return at

    def _ended(self, _text: str, at: int) -> int:
        self._close(ScanStatus.ENDED)
        return at

    def _closed(self, _text: str, at: int) -> int:
        self._close(ScanStatus.CLOSED)
        return at

    def _in_key(self, text: str, at: int) -> int:
        at, complete = self._read_key(text, at)
        if not complete:
            return at
        if text[at] != ">":
            return self._end(at)
        self._begin_value()
        return at + 1


class GlmScanner(XmlScanner):
    """The name and pairs of ``<arg_key>`` and ``<arg_value>``, behind ``<tool_call>``. It is
    certain by its first pair, or by its end."""

    def __init__(self, types: ArgumentTypes) -> None:
        super().__init__(types, VALUE_END, lines=False)

    def _opening(self, text: str, at: int) -> int:
        at = skip_blanks(text, at)
        if at < len(text):
            self._step = self._in_name
        return at

    def _in_name(self, text: str, at: int) -> int:
        at, complete = self._read_name(text, at)
        if complete:
            self.name, self._word = self._word, ""
            self._step = self._before_key
        return at

    def _before_key(self, text: str, at: int) -> int:
        at = skip_blanks(text, at)
        if at < len(text):
            self._step = self._in_tag
        return at

    def _in_tag(self, text: str, at: int) -> int:
        at = self._read_one_of(text, at, {KEY_TAG: self._in_key, CLOSING_TAG: self._closed})
        if self._step == self._in_key:
            self._begin_arguments()
        elif self._step == self._closed:
            self._closed(text, at)
        return at

    def _closed(self, _text: str, at: int) -> int:
        self._close(ScanStatus.CLOSED)
        return at

    def _in_key(self, text: str, at: int) -> int:
        at, complete = self._read_key(text, at)
        if complete:
            self._step = self._in_key_end
        return at

    def _in_key_end(self, text: str, at: int) -> int:
        return self._read_one_of(text, at, {KEY_END: self._behind_key})

    def _behind_key(self, text: str, at: int) -> int:
        at = skip_blanks(text, at)
        if at < len(text):
            self._step = self._in_value_tag
        return at

    def _in_value_tag(self, text: str, at: int) -> int:
        at = self._read_one_of(text, at, {VALUE_TAG: self._in_value})
        if self._step == self._in_value:
            self._begin_value()
        return at
