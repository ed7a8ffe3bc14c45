"""Scanners of calls whose arguments stand between tags, one by one, as plain text."""

from __future__ import annotations

import json
import re

from millrace.registry.tool_formats.argument_types import ArgumentTypes
from millrace.registry.tool_formats.scanners.base import Reading, Scanner, ScanStatus, UnfitError
from millrace.registry.tool_formats.tags import (
    CLOSING_TAG,
    FUNCTION_END,
    FUNCTION_TAG,
    KEY_END,
    KEY_TAG,
    PARAMETER_END,
    PARAMETER_TAG,
    VALUE_END,
    VALUE_TAG,
)

_MAX_KEY_CHARACTERS = 128
_KEY = re.compile(r"[^<>\n]*")


class XmlScanner(Scanner):
    """Base of scanners for arguments between tags.

    Arguments are returned as JSON: text as it arrives, other values when they are complete. A value
    ends at ``value_end``. With ``lines``, a line break at the beginning and end of a value does not
    belong to it.
    """

    value_end: str
    lines: bool

    def __init__(self, types: ArgumentTypes) -> None:
        super().__init__()
        self._types = types
        self._num_keys = 0

    def _broken_off(self) -> ScanStatus:
        if self.certain:
            self._arguments.append("}")
        return super()._broken_off()

    def _begin_arguments(self) -> None:
        """Make the call certain and begin its object of arguments, unless it has begun."""
        if not self.certain:
            self.certain = True
            self._arguments.append("{")

    def _key(self) -> Reading[str]:
        """Read the name of an argument, up to the tag or bracket after it."""
        key = (yield from self._run(_KEY)).strip()
        if not 0 < len(key) <= _MAX_KEY_CHARACTERS:
            raise UnfitError
        return key

    def _value(self, key: str) -> Reading[None]:
        quoted = json.dumps(key, ensure_ascii=False)
        self._arguments.append(f"{', ' if self._num_keys else ''}{quoted}: ")
        self._num_keys += 1
        is_text = self._types.is_text(self.name, key)
        if is_text:
            self._arguments.append('"')
        if self.lines and (yield from self._next()) == "\n":
            self._at += 1
        value: list[str] = []
        take = self._add_text if is_text else value.append
        yield from self._up_to(self.value_end, take, lines=self.lines)
        self._arguments.append(
            '"' if is_text else self._types.as_json(self.name, key, "".join(value))
        )

    def _add_text(self, text: str) -> None:
        self._arguments.append(json.dumps(text, ensure_ascii=False)[1:-1])


class QwenScanner(XmlScanner):
    """Scanner of ``<function=name><parameter=key>value</parameter></function>`` after
    ``<tool_call>``.

    The call is certain once the name has arrived.
    """

    value_end = PARAMETER_END
    lines = True

    def _read(self) -> Reading[ScanStatus]:
        yield from self._behind_blanks()
        yield from self._tag(FUNCTION_TAG)
        self.name = yield from self._word()
        self._read_bracket()
        self._begin_arguments()
        while True:
            yield from self._behind_blanks()
            tag = yield from self._one_of(PARAMETER_TAG, FUNCTION_END, CLOSING_TAG)
            if tag != PARAMETER_TAG:
                self._arguments.append("}")
                return ScanStatus.CLOSED if tag == CLOSING_TAG else ScanStatus.ENDED
            key = yield from self._key()
            self._read_bracket()
            yield from self._value(key)

    def _read_bracket(self) -> None:
        if self._text[self._at] != ">":
            raise UnfitError
        self._at += 1


class GlmScanner(XmlScanner):
    """Scanner of a name and pairs of ``<arg_key>`` and ``<arg_value>`` after ``<tool_call>``.

    The call is certain with its first pair, or at its end.
    """

    value_end = VALUE_END
    lines = False

    def _read(self) -> Reading[ScanStatus]:
        yield from self._behind_blanks()
        self.name = yield from self._word()
        while True:
            yield from self._behind_blanks()
            tag = yield from self._one_of(KEY_TAG, CLOSING_TAG)
            self._begin_arguments()
            if tag == CLOSING_TAG:
                self._arguments.append("}")
                return ScanStatus.CLOSED
            key = yield from self._key()
            yield from self._tag(KEY_END)
            yield from self._behind_blanks()
            yield from self._tag(VALUE_TAG)
            yield from self._value(key)
