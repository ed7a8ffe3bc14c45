"""What a text of each format looks like around its calls."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from millrace.registry.tool_formats.argument_types import ArgumentTypes
from millrace.registry.tool_formats.scanners.base import Scanner
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
from millrace.schemas.tools import ToolFormat

_BLANKS = re.compile(r"[ \t\n\r]*")
_JSON_BEGINS = re.compile(r"\{")


class Syntax(NamedTuple):
    """``scanner`` makes one for the first call of a text or for another, whose arguments are of
    these types. Calls follow ``opening``, which some models forget: then they begin by
    ``bare_opening``, which is a part of the call. Without an opening they are the whole text,
    behind ``first_gap``. Behind a call and ``gap`` comes ``closing``, and then content, or what
    ``begins`` another call. ``tags`` are those of a gap that may have come in part; a gap before
    what is no call is content if ``shows_gap``. What begins by ``opening`` and is cut off is
    content, unless that is a ``marker``, which no prose has."""

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
