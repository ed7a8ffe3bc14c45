"""What the scanners of all formats have in common."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import Enum, auto

BLANKS = " \t\n\r"
NO_ARGUMENTS = "{}"
MAX_WORD_CHARACTERS = 64

_NOT_BLANK = re.compile(r"[^ \t\n\r]")
_WORD = re.compile(r"[A-Za-z0-9_-]*")


class ScanStatus(Enum):
    """OPEN: more is to come. ENDED: the call is there. CLOSED: so is what ends all calls. FAILED:
    this is no call."""

    OPEN = auto()
    ENDED = auto()
    CLOSED = auto()
    FAILED = auto()


Step = Callable[[str, int], int]


class Scanner(ABC):
    """Follows a text from where a call may begin.

    As soon as it is ``certain`` the call stands, whatever follows, and its arguments can be taken
    as they come. The state after a text does not depend on how it was cut.
    """

    def __init__(self) -> None:
        self.status = ScanStatus.OPEN
        self.certain = False
        self.name = ""
        self._step: Step = self._opening
        self._word = ""
        self._escaped = False
        self._quoted = False
        self._closers: list[str] = []
        self._arguments: list[str] = []

    def feed(self, text: str) -> int:
        """Go on by ``text``; how many of its characters belong here (all, while OPEN)."""
        at = 0
        while at < len(text) and self.status is ScanStatus.OPEN:
            at = self._step(text, at)
        return at

    @property
    def is_whole(self) -> bool:
        """Whether all of the arguments have come."""
        return self.status is not ScanStatus.OPEN

    @property
    def is_malformed(self) -> bool:
        """Whether the arguments have stopped being JSON."""
        return False

    def take_arguments(self) -> str:
        """The arguments that have come since the last time; nothing before it is ``certain``."""
        if not self.certain:
            return ""
        taken = "".join(self._arguments)
        self._arguments.clear()
        return taken

    def finish(self) -> None:  # noqa: B027  (most keep nothing back)
        """No more text comes: what was kept back is an argument's, or nobody's."""

    @abstractmethod
    def _opening(self, text: str, at: int) -> int:
        """The first step; a step gives where it ends, beyond ``at`` unless it is another's turn."""

    def _expect(self, text: str, at: int, character: str, then: Step) -> int:
        at = skip_blanks(text, at)
        if at == len(text):
            return at
        if text[at] != character:
            return self._fail(at)
        self._step = then
        return at + 1

    def _read_tag(self, text: str, at: int, tag: str, then: Step) -> int:
        """Go on with ``tag``, of which ``_word`` is what has come."""
        while at < len(text) and text[at] == tag[len(self._word)]:
            self._word += text[at]
            at += 1
            if self._word == tag:
                self._word = ""
                self._step = then
                return at
        return at if at == len(text) else self._fail(at)

    def _read_name(self, text: str, at: int) -> tuple[int, bool]:
        """Go on with a word; where it ends here, and whether it is certain that it does. A word of
        no characters, or of too many, fails."""
        at, found = run(_WORD, text, at)
        self._word += found
        if len(self._word) > MAX_WORD_CHARACTERS or (at < len(text) and not self._word):
            return self._fail(at), False
        return at, at < len(text)

    def _fail(self, at: int) -> int:
        self.status = ScanStatus.ENDED if self.certain else ScanStatus.FAILED
        return at


def start_of_partial(text: str, tag: str) -> int:
    """Where the end of ``text`` may be the beginning of ``tag``; its length if nowhere."""
    at = text.find(tag[0], max(0, len(text) - len(tag) + 1))
    while at >= 0:
        if tag.startswith(text[at:]):
            return at
        at = text.find(tag[0], at + 1)
    return len(text)


def skip_blanks(text: str, at: int) -> int:
    """Where the first character that is no blank is, from ``at``; the length if there is none."""
    found = _NOT_BLANK.search(text, at)
    return len(text) if found is None else found.start()


def run(pattern: re.Pattern[str], text: str, at: int) -> tuple[int, str]:
    """Where the match at ``at`` ends, and the match; for patterns that match anywhere."""
    found = pattern.match(text, at)
    assert found is not None
    return found.end(), found.group()
