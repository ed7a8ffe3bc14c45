"""What a text of each format looks like around its calls."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from registry.tool_formats.bracket_scanner import CALLS_TAG, BracketScanner
from registry.tool_formats.call_scanner import CallScanner
from registry.tool_formats.python_scanner import PythonScanner
from registry.tool_formats.scanner import Scanner
from schemas.tools import ToolFormat

_BLANKS = re.compile(r"[ \t\n\r]*")
_JSON_BEGINS = re.compile(r"\{")


class Syntax(NamedTuple):
    """``scanner`` makes one for the first call of a text or for another. Calls follow ``opening``,
    or are the whole text, behind ``first_gap``, if that is empty. Behind a call and ``gap`` comes
    ``closing``, and then content, or what ``begins`` another call. ``tags`` are those of a gap that
    may have come in part; a gap before what is no call is content if ``shows_gap``. What begins by
    ``opening`` and is cut off is content, unless that is a ``marker``, which no prose has."""

    scanner: Callable[[bool], Scanner]
    opening: str = ""
    closing: str = ""
    begins: re.Pattern[str] = _JSON_BEGINS
    first_gap: re.Pattern[str] = _BLANKS
    gap: re.Pattern[str] = _BLANKS
    tags: tuple[str, ...] = ()
    shows_gap: bool = False
    marker: bool = False


SYNTAXES = {
    ToolFormat.HERMES: Syntax(
        lambda _: CallScanner("</tool_call>"),
        opening="<tool_call>",
        closing="</tool_call>",
        tags=("</tool_call>",),
    ),
    ToolFormat.LLAMA3: Syntax(
        lambda _: CallScanner(""),
        first_gap=re.compile(r"(?:[ \t\n\r]|<\|python_tag\|>)*"),
        gap=re.compile(r"(?:[ \t\n\r;]|<\|python_tag\|>)*"),
        tags=("<|python_tag|>",),
        shows_gap=True,
    ),
    ToolFormat.PYTHONIC: Syntax(
        lambda first: PythonScanner(first=first),
        closing="]",
        begins=re.compile(""),
        first_gap=re.compile(r"(?:[ \t\n\r]|<\|python_start\|>)*"),
        gap=re.compile(r"[ \t\n\r,]*"),
        tags=("<|python_start|>",),
    ),
    ToolFormat.MISTRAL: Syntax(
        lambda _: BracketScanner(),
        opening=CALLS_TAG,
        closing="]",
        gap=re.compile(r"[ \t\n\r,]*"),
        marker=True,
    ),
}
SYNTAXES[ToolFormat.MISTRAL_V11] = SYNTAXES[ToolFormat.MISTRAL]
