"""Base of the scanners of all formats."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from enum import Enum, auto
from typing import TypeVar

BLANKS = " \t\n\r"
NO_ARGUMENTS = "{}"
MAX_WORD_CHARACTERS = 64

_NOT_BLANK = re.compile(r"[^ \t\n\r]")
_WORD = re.compile(r"[A-Za-z0-9_-]*")
_IN_STRING = {quote: re.compile(rf"[{quote}\\]") for quote in "\"'"}

T = TypeVar("T")
# Generator that reads text and yields whenever it needs more.
Reading = Generator[None, None, T]


class ScanStatus(Enum):
    """Status of a scanner.

    OPEN: more text is to come. ENDED: the call is complete. CLOSED: the call is complete, and so is
    the end of all calls. FAILED: this is no call.
    """

    OPEN = auto()
    ENDED = auto()
    CLOSED = auto()
    FAILED = auto()


class UnfitError(Exception):
    """Text that does not belong to a call."""


class Scanner(ABC):
    """Scanner of a text from where a call may begin.

    Once it is ``certain``, later text cannot revoke the call, and its arguments can be taken as
    they arrive. The state depends only on the text, not on how it was cut.
    """

    def __init__(self) -> None:
        self.status = ScanStatus.OPEN
        self.certain = False
        self.name = ""
        self._text = ""
        self._at = 0
        self._reading = self._read()
        self._arguments: list[str] = []
        self._tail = ""
        self._passed: list[str] | None = None
        self._begin = 0

    def feed(self, text: str) -> int:
        """Read ``text``, and return how many of its characters belong to the call (all while
        OPEN).
        """
        if self.status is not ScanStatus.OPEN:
            return 0
        self._text, self._at, self._begin = text, 0, 0
        try:
            next(self._reading)
        except StopIteration as end:
            self.status = end.value
        except UnfitError:
            self.status = self._broken_off()
        if self._passed is not None:
            self._passed.append(text[self._begin : self._at])
        return self._at

    @property
    def is_whole(self) -> bool:
        """True if all of the arguments have arrived."""
        return self.status is not ScanStatus.OPEN

    @property
    def is_malformed(self) -> bool:
        """True if the arguments have stopped being JSON."""
        return False

    def take_arguments(self) -> str:
        """Return the arguments since the last call of this method; empty before the call is
        ``certain``.
        """
        if not self.certain:
            return ""
        taken = "".join(self._arguments)
        self._arguments.clear()
        return taken

    def finish(self) -> None:  # noqa: B027  (most scanners hold nothing back)
        """Finish: no more text comes, and held text belongs to an argument or is dropped."""

    @abstractmethod
    def _read(self) -> Reading[ScanStatus]:
        """Read one call, and return the status after it. Raises UnfitError."""

    def _broken_off(self) -> ScanStatus:
        """Return the status after text that does not continue a call."""
        return ScanStatus.ENDED if self.certain else ScanStatus.FAILED

    def _next(self) -> Reading[str]:
        """Return the next character without reading it."""
        while self._at == len(self._text):
            yield
        return self._text[self._at]

    def _behind_blanks(self) -> Reading[str]:
        """Return the next character that is not blank, without reading it."""
        while True:
            found = _NOT_BLANK.search(self._text, self._at)
            if found is not None:
                self._at = found.start()
                return found.group()
            self._at = len(self._text)
            yield

    def _expect(self, character: str) -> Reading[None]:
        """Read ``character``, and blanks before it."""
        if (yield from self._behind_blanks()) != character:
            raise UnfitError
        self._at += 1

    def _tag(self, tag: str) -> Reading[None]:
        yield from self._one_of(tag)

    def _one_of(self, *tags: str) -> Reading[str]:
        word = ""
        while word not in tags:
            word += yield from self._next()
            if not any(tag.startswith(word) for tag in tags):
                raise UnfitError
            self._at += 1
        return word

    def _run(self, pattern: re.Pattern[str], most: float = math.inf) -> Reading[str]:
        """Read the characters that match ``pattern``, up to another character or beyond
        ``most``.
        """
        word = ""
        while True:
            found = pattern.match(self._text, self._at)
            assert found is not None, "it matches anywhere"
            word += found.group()
            self._at = found.end()
            if self._at < len(self._text) or len(word) > most:
                return word
            yield

    def _word(self) -> Reading[str]:
        """Read a name, up to a character that cannot be part of it."""
        word = yield from self._run(_WORD, MAX_WORD_CHARACTERS)
        if not 0 < len(word) <= MAX_WORD_CHARACTERS:
            raise UnfitError
        return word

    def _quoted_word(self) -> Reading[str]:
        """Read a word without escapes, and its closing quote."""
        word = yield from self._run(_WORD, MAX_WORD_CHARACTERS)
        if len(word) > MAX_WORD_CHARACTERS or self._text[self._at] != '"':
            raise UnfitError
        self._at += 1
        return word

    def _string(self, quote: str = '"', most: float = math.inf) -> Reading[None]:
        """Read a string and its closing quote, up to ``most`` characters."""
        while True:
            begin = self._at
            mark = _IN_STRING[quote].search(self._text, begin)
            self._at = len(self._text) if mark is None else mark.end()
            most -= self._at - begin
            if most < 0:
                self._at += int(most)
                raise UnfitError
            if mark is None:
                yield
            elif mark.group() == quote:
                return
            else:
                yield from self._next()
                self._at += 1
                most -= 1

    def _pass_into(self, passed: list[str] | None) -> None:
        """Add everything read from now on to ``passed``; None: to nothing."""
        if self._passed is not None:
            self._passed.append(self._text[self._begin : self._at])
        self._passed, self._begin = passed, self._at

    def _up_to(
        self, tag: str, take: Callable[[str], None], *, lines: bool = False
    ) -> Reading[None]:
        """Pass the text before ``tag`` to ``take`` as it arrives, and read the tag.

        With ``lines``, a line break before the tag belongs to the tag.
        """
        while True:
            data = self._tail + self._text[self._at :]
            end = data.find(tag)
            if end >= 0:
                self._at += end + len(tag) - len(self._tail)
                self._tail = ""
                take(data[: end - (lines and data[:end].endswith("\n"))])
                return
            cut = start_of_partial(data, tag)
            cut -= lines and data[:cut].endswith("\n")
            take(data[:cut])
            self._tail = data[cut:]
            self._at = len(self._text)
            yield


def start_of_partial(text: str, tag: str) -> int:
    """Return where the end of ``text`` may be the beginning of ``tag``; its length if nowhere."""
    at = text.find(tag[0], max(0, len(text) - len(tag) + 1))
    while at >= 0:
        if tag.startswith(text[at:]):
            return at
        at = text.find(tag[0], at + 1)
    return len(text)
