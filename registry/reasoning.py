"""Parser of a completion's text into reasoning and the answer after it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from msgspec.structs import replace

from millrace.registry.tool_formats.scanners.base import BLANKS, start_of_partial
from millrace.schemas.chat.reasoning import ReasoningFormat

# Formats to look for: a template that contains an end mark belongs to a reasoning model.
_KNOWN = (ReasoningFormat(), ReasoningFormat(start="[THINK]", end="[/THINK]"))


class _At(Enum):
    BEFORE = auto()  # only blanks so far, and perhaps a part of the start mark
    WITHIN = auto()
    BEHIND = auto()  # only blanks since the end mark
    ANSWER = auto()


class ReasoningParser:
    """Parser of one completion.

    Reasoning is stripped of blanks around it, and the answer of blanks before it. The result
    depends only on the text, not on how it was cut.
    """

    def __init__(self, reasoning: ReasoningFormat) -> None:
        self._format = reasoning
        self._at = _At.BEFORE
        self._held = ""
        self._has_begun = reasoning.is_open
        self._has_thought = False

    @property
    def ended(self) -> bool:
        """True if all further text is the answer."""
        return self._at is _At.ANSWER

    @property
    def is_within(self) -> bool:
        """True if reasoning has begun, even if only in the prompt, and has not ended."""
        return self._at is _At.WITHIN or (self._at is _At.BEFORE and self._format.is_open)

    @property
    def is_past(self) -> bool:
        """True if reasoning has begun and ended."""
        return self._at is not _At.BEFORE and self._has_begun and not self.is_within

    @property
    def is_certain(self) -> bool:
        """True if no text is held back."""
        return not self._held

    def push(self, text: str) -> tuple[str, str]:
        """Add ``text``, and return the reasoning and the answer that are certain now."""
        thoughts, data = "", self._held + text
        self._held = ""
        if self._at is _At.BEFORE:
            data = self._begin(data)
        if self._at is _At.WITHIN:
            thoughts, data = self._think(data)
        if self._at is _At.BEHIND:
            data = data.lstrip(BLANKS)
            if data:
                self._at = _At.ANSWER
        return thoughts, data

    def finish(self) -> tuple[str, str]:
        """Return the remaining text at the end; nothing may be pushed after it."""
        held, self._held = self._held, ""
        if self._at is _At.WITHIN:
            return held.rstrip(BLANKS), ""
        if self._at is _At.BEFORE and self._format.is_open:
            return held.strip(BLANKS), ""
        return "", held

    def _begin(self, data: str) -> str:
        text, start = data.lstrip(BLANKS), self._format.start
        if text.startswith(start):
            self._at = _At.WITHIN
            self._has_begun = True
            return text[len(start) :]
        if start.startswith(text):
            self._held = data
            return ""
        self._at = _At.WITHIN if self._format.is_open else _At.ANSWER
        return data

    def _think(self, data: str) -> tuple[str, str]:
        """Return the reasoning up to its end, and the text after it."""
        if not self._has_thought:
            data = data.lstrip(BLANKS)
        end = self._format.end
        found = data.find(end)
        thoughts = data[: found if found >= 0 else start_of_partial(data, end)].rstrip(BLANKS)
        self._has_thought = self._has_thought or bool(thoughts)
        if found >= 0:
            self._at = _At.BEHIND
            return thoughts, data[found + len(end) :]
        self._held = data[len(thoughts) :]
        return thoughts, ""


def format_shown(template: str) -> ReasoningFormat | None:
    """Return the reasoning format of a model with this chat template; None if it shows none."""
    return next((one for one in _KNOWN if one.end in template), None)


def format_after(prompt: str, reasoning: ReasoningFormat) -> ReasoningFormat | None:
    """Return the format for a completion after ``prompt``; None if the prompt has already ended the
    reasoning.
    """
    text = prompt.rstrip(BLANKS)
    if text.endswith(reasoning.end):
        return None
    return replace(reasoning, is_open=text.endswith(reasoning.start))


def format_within(
    content: str, thoughts: str, reasoning: ReasoningFormat
) -> ReasoningFormat | None:
    """Return the format for a completion that continues a message.

    The message has ``content`` after the reasoning ``thoughts``. None if it is past its reasoning.
    """
    if thoughts and not content:
        return replace(reasoning, is_open=True)
    parser = ReasoningParser(reasoning)
    parser.push(content)
    return replace(reasoning, is_open=True) if parser.is_within else None


def closing_of(reasoning: ReasoningFormat) -> str:
    """Return the text that ends reasoning when it is appended to a prompt."""
    opening = "" if reasoning.is_open else reasoning.start
    return f"{opening}\n\n{reasoning.end}\n\n"


def num_reasoning_tokens(reasoning: ReasoningFormat, pieces: Sequence[str]) -> int:
    """Return the number of a completion's tokens that are reasoning; ``pieces`` has the text of
    each token.
    """
    parser = ReasoningParser(reasoning)
    for number, piece in enumerate(pieces, start=1):
        parser.push(piece)
        if parser.is_past:
            return number
        if parser.ended:
            return 0
    return len(pieces) if parser.is_within else 0
