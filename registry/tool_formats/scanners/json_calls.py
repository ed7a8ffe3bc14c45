"""Scanners of calls whose arguments are a JSON object."""

from __future__ import annotations

import json
import re

from millrace.registry.tool_formats.scanners.base import (
    MAX_WORD_CHARACTERS,
    NO_ARGUMENTS,
    Reading,
    Scanner,
    ScanStatus,
    UnfitError,
)
from millrace.registry.tool_formats.tags import (
    ARGUMENTS_TAG,
    CALL_BEGIN,
    CALL_END,
    CLOSING_TAG,
    FENCE,
    ID_TAG,
    JSON_FENCE,
    SEPARATOR,
)

# "<" occurs in JSON only within strings: it begins a tag that came too early.
_IN_OBJECT = re.compile(r'["{}\[\]<]')
_CLOSERS = {"{": "}", "[": "]"}
_ARGUMENTS = ("arguments", "parameters")
_KEYS = frozenset({"name", "type", "id", *_ARGUMENTS})
_MAX_SIDE_VALUE_CHARACTERS = 256
_SCALAR = re.compile(r"[A-Za-z0-9.+-]*")
_BEHIND_ARGUMENTS = re.compile(r'[A-Za-z0-9_\-,:" \t\n\r]*')


class JsonScanner(Scanner):
    """Scanner of JSON arguments.

    Arguments that stop being JSON continue up to ``closing_tag`` (or to the end, if that is empty).
    The status after the tag is ``behind_tag``.
    """

    closing_tag = ""
    behind_tag = ScanStatus.CLOSED

    def __init__(self) -> None:
        super().__init__()
        self._closers: list[str] = []
        self._is_malformed = False

    @property
    def is_whole(self) -> bool:
        return super().is_whole or (self.certain and not self._closers)

    @property
    def is_malformed(self) -> bool:
        return self._is_malformed

    def finish(self) -> None:
        """Add held text, which may have been part of the tag, to the arguments."""
        self._arguments.append(self._tail)
        self._tail = ""

    def _certain_object(self) -> Reading[ScanStatus | None]:
        """Read an object as ``_object`` does, for a call whose name is known."""
        if (yield from self._behind_blanks()) != "{":
            raise UnfitError
        self.certain = True
        status = yield from self._object()
        if status is None:
            yield from self._next()
        return status

    def _object(self) -> Reading[ScanStatus | None]:
        """Read the arguments. Return the status after them if they stop being JSON, otherwise
        None.
        """
        self._pass_into(self._arguments)
        while True:
            mark = _IN_OBJECT.search(self._text, self._at)
            if mark is None:
                self._at = len(self._text)
                yield
                continue
            self._at = mark.end()
            character = mark.group()
            if character == '"':
                yield from self._string()
            elif character in _CLOSERS:
                self._closers.append(_CLOSERS[character])
            elif character == self._closers[-1]:
                self._closers.pop()
                if not self._closers:
                    self._pass_into(None)
                    return None
            else:
                self._at = mark.start()
                self._pass_into(None)
                return (yield from self._malformed())

    def _malformed(self) -> Reading[ScanStatus]:
        if not self.certain:
            raise UnfitError
        self._is_malformed = True
        if self.closing_tag:
            yield from self._up_to(self.closing_tag, self._arguments.append)
            return self.behind_tag
        self._pass_into(self._arguments)
        while True:
            self._at = len(self._text)
            yield


class CallScanner(JsonScanner):
    """Scanner of one call, ``{"name": …, "arguments": …}``.

    The keys may come in any order, ``type`` and ``id`` among them. Anything else is no call. The
    call is certain once the name is known and the arguments' ``{`` has arrived.
    """

    may_have_id_behind = False

    def _read(self) -> Reading[ScanStatus]:
        yield from self._expect("{")
        seen: set[str] = set()
        while True:
            yield from self._expect('"')
            word = yield from self._quoted_word()
            key = "arguments" if word in _ARGUMENTS else word
            if word not in _KEYS or key in seen:
                raise UnfitError
            seen.add(key)
            yield from self._expect(":")
            status = yield from self._value(key)
            if status is not None:
                return status
            if self.may_have_id_behind and self.certain:
                yield from self._run(_BEHIND_ARGUMENTS)
                self._at += self._text[self._at] == "}"
                return ScanStatus.ENDED
            character = yield from self._behind_blanks()
            if character == "}" and self.name:
                break
            if character != "," or self.certain:
                raise UnfitError
            self._at += 1
        if not self.certain and not self._arguments:
            self._arguments.append(NO_ARGUMENTS)
        self.certain = True
        self._at += 1
        return ScanStatus.ENDED

    def _value(self, key: str) -> Reading[ScanStatus | None]:
        """Read the value of a key. Return the status after the call if its arguments stop being
        JSON, otherwise None.
        """
        first = yield from self._behind_blanks()
        if key == "name":
            yield from self._expect('"')
            self.name = yield from self._quoted_word()
            if not self.name:
                raise UnfitError
        elif key == "arguments" and first == "{":
            self.certain = bool(self.name)
            return (yield from self._object())
        elif first != '"':
            word = yield from self._run(_SCALAR, MAX_WORD_CHARACTERS)
            is_value = 0 < len(word) <= MAX_WORD_CHARACTERS
            if not is_value or (key == "arguments" and word != "null"):
                raise UnfitError
        elif key == "arguments":
            yield from self._quoted_arguments()
        else:
            self._at += 1
            yield from self._string(most=_MAX_SIDE_VALUE_CHARACTERS)
        return None

    def _quoted_arguments(self) -> Reading[None]:
        """Read arguments that were written as JSON within a string."""
        raw: list[str] = []
        self._pass_into(raw)
        self._at += 1
        yield from self._string()
        self._pass_into(None)
        arguments = _unquoted("".join(raw))
        if arguments is None:
            raise UnfitError
        self._arguments.append(arguments)


class HermesScanner(CallScanner):
    """Scanner of a call between tags."""

    closing_tag = CLOSING_TAG


class MistralScanner(CallScanner):
    """Scanner of Mistral's calls.

    A call is an element of a JSON list, which may have its id after its arguments. Or it is
    ``name[CALL_ID]id[ARGS]{…}``, whose id and tags may be missing. That form is CLOSED at once,
    since the next call has its own ``[TOOL_CALLS]``. Ids from models are not kept.
    """

    may_have_id_behind = True

    def _read(self) -> Reading[ScanStatus]:
        first = yield from self._behind_blanks()
        if first in "[{":
            self._at += first == "["
            return (yield from super()._read())
        self.name = yield from self._word()
        if (yield from self._behind_blanks()) == "[":
            self._at += 1
            # The tags differ in their second character.
            if (yield from self._next()) == ID_TAG[1]:
                yield from self._tag(ID_TAG[1:])
                yield from self._word()
                yield from self._tag(ARGUMENTS_TAG)
            else:
                yield from self._tag(ARGUMENTS_TAG[1:])
        return (yield from self._certain_object()) or ScanStatus.CLOSED


class DeepseekScanner(JsonScanner):
    """Scanner of DeepSeek's calls, beginning with the tag that begins a call.

    V3.1 writes ``name<｜tool▁sep｜>{…}``. V3 and R1 write ``function<｜tool▁sep｜>name`` and the
    arguments in a fence.
    """

    closing_tag = CALL_END
    behind_tag = ScanStatus.ENDED

    def _read(self) -> Reading[ScanStatus]:
        yield from self._behind_blanks()
        yield from self._tag(CALL_BEGIN)
        # The name, or the type of the called tool.
        self.name = yield from self._word()
        yield from self._tag(SEPARATOR)
        if (yield from self._behind_blanks()) != "{":
            self.name = yield from self._word()
            if (yield from self._behind_blanks()) == FENCE[0]:
                yield from self._tag(JSON_FENCE)
        return (yield from self._certain_object()) or ScanStatus.ENDED


def _unquoted(literal: str) -> str | None:
    """Return the JSON object within a JSON string; None if there is none."""
    try:
        text = json.loads(literal, strict=False)
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    return text if isinstance(value, dict) else None
