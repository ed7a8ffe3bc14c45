"""Parser of a model's text as it arrives: content and tool calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from millrace.registry.tool_formats.argument_types import ArgumentTypes
from millrace.registry.tool_formats.scanners.base import (
    BLANKS,
    Scanner,
    ScanStatus,
    start_of_partial,
)
from millrace.registry.tool_formats.scanners.json_calls import (
    CallScanner,
    DeepseekScanner,
    HermesScanner,
    MistralScanner,
)
from millrace.registry.tool_formats.scanners.python_calls import PythonScanner
from millrace.registry.tool_formats.scanners.xml_calls import GlmScanner, QwenScanner
from millrace.registry.tool_formats.tags import (
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    CALLS_TAG,
    CLOSING_TAG,
    FENCE,
    FUNCTION_TAG,
    OPENING_TAG,
)
from millrace.schemas.tools import ToolDefinition, ToolFormat

_BLANKS = re.compile(r"[ \t\n\r]*")
_JSON_BEGINS = re.compile(r"\{")


class Syntax(NamedTuple):
    """Syntax of a tool format.

    - ``scanner`` creates the scanner of a call, given whether it is the first call, and the
      argument types.
    - Calls follow ``opening``. Some models forget it; then calls begin with ``bare_opening``, which
      is part of the call. Without an opening the whole text is calls, after ``first_gap``.
    - After a call and ``gap`` comes ``closing`` and then content, or a match of ``begins`` and
      another call. ``tags`` are tags that may have arrived partially in a gap. With ``shows_gap``,
      a gap before content is content.
    - Text that begins with ``opening`` and is cut off is content, unless the opening is a
      ``marker``, which never occurs in prose.
    """

    scanner: Callable[[bool, ArgumentTypes], Scanner]
    opening: str = ""
    bare_opening: str = ""
    closing: str = ""
    begins: re.Pattern[str] = _JSON_BEGINS
    first_gap: re.Pattern[str] = _BLANKS
    gap: re.Pattern[str] = _BLANKS
    tags: tuple[str, ...] = ()
    shows_gap: bool = False
    marker: bool = False


SYNTAXES = {
    ToolFormat.HERMES: Syntax(
        lambda _first, _types: HermesScanner(),
        opening=OPENING_TAG,
        closing=CLOSING_TAG,
        tags=(CLOSING_TAG,),
    ),
    ToolFormat.LLAMA3: Syntax(
        lambda _first, _types: CallScanner(),
        first_gap=re.compile(r"(?:[ \t\n\r]|<\|python_tag\|>)*"),
        gap=re.compile(r"(?:[ \t\n\r;]|<\|python_tag\|>)*"),
        tags=("<|python_tag|>",),
        shows_gap=True,
    ),
    ToolFormat.PYTHONIC: Syntax(
        lambda first, _types: PythonScanner(first=first),
        closing="]",
        begins=re.compile(""),
        first_gap=re.compile(r"(?:[ \t\n\r]|<\|python_start\|>)*"),
        gap=re.compile(r"[ \t\n\r,]*"),
        tags=("<|python_start|>",),
    ),
    ToolFormat.MISTRAL: Syntax(
        lambda _first, _types: MistralScanner(),
        opening=CALLS_TAG,
        closing="]",
        gap=re.compile(r"[ \t\n\r,]*"),
        marker=True,
    ),
    ToolFormat.QWEN3_CODER: Syntax(
        lambda _first, types: QwenScanner(types),
        opening=OPENING_TAG,
        bare_opening=FUNCTION_TAG,
        closing=CLOSING_TAG,
        begins=re.compile(FUNCTION_TAG),
        tags=(CLOSING_TAG, FUNCTION_TAG),
        marker=True,
    ),
    ToolFormat.DEEPSEEK_V3: Syntax(
        lambda _first, _types: DeepseekScanner(),
        opening=CALLS_BEGIN,
        closing=CALLS_END,
        begins=re.compile(re.escape(CALL_BEGIN)),
        gap=re.compile(rf"(?:[ \t\n\r]|{FENCE}|{re.escape(CALL_END)})*"),
        tags=(FENCE, CALL_END, CALL_BEGIN, CALLS_END),
        marker=True,
    ),
    ToolFormat.GLM45: Syntax(
        lambda _first, types: GlmScanner(types),
        opening=OPENING_TAG,
        marker=True,
    ),
}
SYNTAXES[ToolFormat.DEEPSEEK_V31] = SYNTAXES[ToolFormat.DEEPSEEK_V3]
SYNTAXES[ToolFormat.MISTRAL_V11] = SYNTAXES[ToolFormat.MISTRAL]


class ContentPiece(NamedTuple):
    """Piece of text for the reader; never empty."""

    text: str


class CallPiece(NamedTuple):
    """Beginning of a call: the ``call``-th of the text, from 0."""

    call: int
    call_id: str
    name: str


class ArgumentsPiece(NamedTuple):
    """Piece of a call's arguments as the model writes them; never empty."""

    call: int
    text: str


Piece = ContentPiece | CallPiece | ArgumentsPiece


class ToolCallParser:
    """Parser of one completion.

    ``new_id`` is called once for each call, in order. ``tools`` give the argument types in formats
    that write arguments as plain text.

    Arguments are streamed as the model writes them. Blanks around calls are not content, so blanks
    at the end of a text are held back until it is known what follows. Text that looks like a call
    but is none comes out as content, unchanged. In HERMES a call follows ``<tool_call>``; in LLAMA3
    the whole text is one call or several.

    The result depends only on the text, not on how it was cut. With ``must_call`` a text holds only
    calls, and an incomplete rest is not content.

    After ``finish``, ``is_last_call_cut`` says that the arguments of the last call are incomplete.
    ``is_cut_in_call`` says that the text ended within a call, which may have no name yet.
    """

    def __init__(
        self,
        tool_format: ToolFormat,
        new_id: Callable[[], str],
        tools: Sequence[ToolDefinition] = (),
        *,
        must_call: bool = False,
    ) -> None:
        self._new_id = new_id
        self._must_call = must_call
        self._syntax = SYNTAXES[tool_format]
        self._opening = self._syntax.opening
        self._openings = [tag for tag in (self._opening, self._syntax.bare_opening) if tag]
        # If the whole text is calls, a tag may precede them.
        self._begin_tags = tuple(self._openings) or self._syntax.tags
        self._step: Callable[[str, list[Piece]], str] = (
            self._content if self._opening else self._between
        )
        self._types = ArgumentTypes(tools)
        self._scanner = self._syntax.scanner(True, self._types)
        self._candidate: list[str] = []
        self._held = ""
        self._after_call = False
        self._plain = bool(self._opening)
        self._has_ended_call = False
        self.num_calls = 0
        self.is_last_call_cut = False
        self.is_cut_in_call = False

    @property
    def is_certain(self) -> bool:
        """True if all of the text is content that has been returned, so ``finish`` adds nothing."""
        return self._plain

    def push(self, text: str) -> list[Piece]:
        """Add ``text``, and return the pieces that are certain now."""
        if self._plain and text:
            opening = self._opening
            if not opening or (opening[0] not in text and text[-1] > " "):
                return [ContentPiece(text)]
        pieces: list[Piece] = []
        while text:
            text = self._step(text, pieces)
        return pieces

    def text_behind_call(self, text: str) -> str | None:
        """Read ``text`` up to the end of the first call. Return the text after the call; None if it
        has not ended.
        """
        pieces: list[Piece] = []
        while text and not self._has_ended_call:
            text = self._step(text, pieces)
        return text if self._has_ended_call else None

    def finish(self, *, is_cut_off: bool = False) -> list[Piece]:
        """Return the remaining pieces at the end; nothing may be pushed after it.

        ``is_cut_off``: the model had more to say, so text after an opening tag is not content.
        Arguments that stopped being JSON count as cut only then; otherwise they are complete.
        """
        pieces: list[Piece] = []
        scanner = self._scanner
        self.is_cut_in_call = self._step == self._in_call and not scanner.is_whole
        if self._step == self._in_call and scanner.certain:
            if scanner.is_malformed and not is_cut_off:
                self.is_cut_in_call = False
            self.is_last_call_cut = self.is_cut_in_call
            scanner.finish()
            self._take_arguments(pieces)
        elif not self._must_call:
            left = self._held
            if self._step == self._in_call:
                # A cut-off text after a call or a marker is a call.
                is_call = bool(self.num_calls) or self._syntax.marker
                left = "" if is_call else "".join(self._candidate)
            elif self._step != self._content and self.num_calls:
                left = ""
            if not (is_cut_off and left.lstrip(BLANKS).startswith(self._begin_tags)):
                _say(pieces, left)
        self._held = ""
        return pieces

    def _content(self, text: str, pieces: list[Piece]) -> str:
        if not self._opening:
            if self._after_call:
                text = text.lstrip(BLANKS)
                self._after_call = not text
            _say(pieces, text)
            return ""
        return self._content_from(self._held + text, 0, pieces)

    def _content_from(self, data: str, unread: int, pieces: list[Piece]) -> str:
        """Return the content up to the next tag, which is searched from ``unread`` on."""
        found, opening = self._find_opening(data, unread)
        end = found if opening else self._start_of_opening(data, unread)
        content = data[:end].rstrip(BLANKS)
        blanks = data[len(content) : end]
        if self._after_call:
            content = content.lstrip(BLANKS)
            if content:
                self._after_call = False
            else:
                blanks = ""
        _say(pieces, content)
        if opening:
            self._plain = False
            # The scanner of a call reads the tag if it belongs to the call.
            begin = found if opening == self._syntax.bare_opening else found + len(opening)
            self._begin_call(blanks + data[found:begin])
            return data[begin:]
        self._held = blanks + data[end:]
        self._plain = not self._held and not self._after_call
        return ""

    def _find_opening(self, data: str, unread: int) -> tuple[int, str]:
        """Return the place of the next opening tag from ``unread`` on, and the tag; an empty tag if
        there is none.
        """
        places = [(data.find(tag, unread), tag) for tag in self._openings]
        return min((place for place in places if place[0] >= 0), default=(len(data), ""))

    def _start_of_opening(self, data: str, unread: int) -> int:
        """Return where an incomplete opening tag may begin."""
        return unread + min(start_of_partial(data[unread:], tag) for tag in self._openings)

    def _begin_call(self, prelude: str) -> None:
        self._held = ""
        self._candidate = [prelude]
        self._scanner = self._syntax.scanner(self.num_calls == 0, self._types)
        self._step = self._in_call

    def _in_call(self, text: str, pieces: list[Piece]) -> str:
        scanner = self._scanner
        was_certain = scanner.certain
        end = scanner.feed(text)
        if scanner.certain:
            if not was_certain:
                pieces.append(CallPiece(self.num_calls, self._new_id(), scanner.name))
                self.num_calls += 1
                self._candidate.clear()
            self._take_arguments(pieces)
        else:
            self._candidate.append(text[:end])
        rest = text[end:]
        match scanner.status:
            case ScanStatus.OPEN:
                return ""
            case ScanStatus.ENDED:
                self._has_ended_call = True
                self._step = self._between
                return rest
            case ScanStatus.CLOSED:
                self._has_ended_call = True
                self._step = self._content
                self._after_call = True
                return rest
            case ScanStatus.FAILED:
                return self._refuse("".join(self._candidate), rest, pieces)

    def _between(self, text: str, pieces: list[Piece]) -> str:
        """Read before the first call of a text that may be all calls, or just after a call."""
        syntax = self._syntax
        data = self._held + text
        found = (syntax.gap if self.num_calls else syntax.first_gap).match(data)
        assert found is not None
        gap, rest = found.group(), data[found.end() :]
        if not rest or any(rest != tag and tag.startswith(rest) for tag in syntax.tags):
            self._held = data
            return ""
        self._held = ""
        if self.num_calls:
            if syntax.closing and rest.startswith(syntax.closing):
                self._step = self._content
                self._after_call = True
                return rest[len(syntax.closing) :]
            gap = gap.lstrip(BLANKS) if syntax.shows_gap else ""
        if syntax.begins.match(rest):
            self._begin_call(gap)
            return rest
        return self._refuse(gap, rest, pieces)

    def _refuse(self, text: str, rest: str, pieces: list[Piece]) -> str:
        """Return ``text`` to content, as it is no call after all; ``rest`` follows it."""
        self._step = self._content
        if self._opening:
            return self._content_from(text + rest, len(text), pieces)
        self._plain = True
        _say(pieces, text + rest)
        return ""

    def _take_arguments(self, pieces: list[Piece]) -> None:
        arguments = self._scanner.take_arguments()
        if arguments:
            pieces.append(ArgumentsPiece(self.num_calls - 1, arguments))


def _say(pieces: list[Piece], text: str) -> None:
    if text:
        pieces.append(ContentPiece(text))
