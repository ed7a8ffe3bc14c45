"""Arguments that are an object in JSON, followed while it is being written."""

from __future__ import annotations

import re
from abc import abstractmethod

from millrace.registry.tool_formats.scanners.base import Scanner, ScanStatus, start_of_partial

_IN_STRING = re.compile(r'["\\]')
# "<" is nowhere in JSON but in strings: it begins the tag that should have come later.
_IN_OBJECT = re.compile(r'["{}\[\]<]')
_CLOSERS = {"{": "}", "[": "]"}


class JsonScanner(Scanner):
    """What stops being JSON in the arguments belongs to them up to ``closing_tag`` (or to the end,
    if that is empty); behind it the status is ``behind_tag``."""

    def __init__(self, closing_tag: str = "", behind_tag: ScanStatus = ScanStatus.CLOSED) -> None:
        super().__init__()
        self._closing_tag = closing_tag
        self._behind_tag = behind_tag
        self._tail = ""

    @property
    def is_whole(self) -> bool:
        return super().is_whole or (self.certain and not self._closers)

    @property
    def is_malformed(self) -> bool:
        return self._step == self._in_malformed

    def finish(self) -> None:
        """What was kept back as a part of the tag belongs to the arguments."""
        self._arguments.append(self._tail)
        self._tail = ""

    @abstractmethod
    def _after_arguments(self, text: str, at: int, /) -> int:
        """The step behind an object of arguments."""

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
                    self._step = self._after_arguments
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
            self.status = self._behind_tag
            at += end + len(self._closing_tag) - len(self._tail)
            self._tail = ""
            return at
        cut = start_of_partial(data, self._closing_tag)
        self._arguments.append(data[:cut])
        self._tail = data[cut:]
        return len(text)

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
