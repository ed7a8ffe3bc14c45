"""Calls of DeepSeek's models."""

from __future__ import annotations

import pytest

from millrace.registry.tool_formats.tags import (
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    SEPARATOR,
)
from millrace.schemas.tools import ToolFormat
from tests.registry.tool_formats.reading import read


def plain(name: str, arguments: str) -> str:
    return f"{CALL_BEGIN}{name}{SEPARATOR}{arguments}{CALL_END}"


def fenced(name: str, arguments: str) -> str:
    return f"{CALL_BEGIN}function{SEPARATOR}{name}\n```json\n{arguments}\n```{CALL_END}"


def section(*calls: str) -> str:
    return CALLS_BEGIN + "\n".join(calls) + CALLS_END


@pytest.mark.parametrize("tool_format", [ToolFormat.DEEPSEEK_V3, ToolFormat.DEEPSEEK_V31])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Is 1 <｜ 2? ", "Is 1 <｜ 2? ", []),
        (section(plain("f", '{"a": 1}')), "", [("f", '{"a": 1}')]),
        ("Hm.\n" + section(fenced("f", '{"a": "```"}')), "Hm.", [("f", '{"a": "```"}')]),
        (
            section(plain("f", "{}"), fenced("g-1", '{"b": [{}]}')) + " So.",
            "So.",
            [("f", "{}"), ("g-1", '{"b": [{}]}')],
        ),
        (section(f"{CALL_BEGIN}function{SEPARATOR}f\n{{}}{CALL_END}"), "", [("f", "{}")]),
        # Cut off.
        (f"Hm {CALLS_BEGIN}{CALL_BEGIN}func", "Hm", []),
        (f"{CALLS_BEGIN}{CALL_BEGIN}function{SEPARATOR}get_we", "", []),
        (f'{CALLS_BEGIN}{CALL_BEGIN}f{SEPARATOR}{{"a": "b', "", [("f", '{"a": "b')]),
        (CALLS_BEGIN + plain("f", "{}") + CALL_BEGIN[:9], "", [("f", "{}")]),
        (CALLS_BEGIN + plain("f", "{}") + CALL_BEGIN + "g", "", [("f", "{}")]),
        (section(fenced("f", "{}"))[: -len(CALLS_END + CALL_END) - 1], "", [("f", "{}")]),
        # Not quite JSON.
        (
            section(plain("f", '{"a": [}'), plain("g", "{}")),
            "",
            [("f", '{"a": [}'), ("g", "{}")],
        ),
        # No calls.
        (f"{CALLS_BEGIN}none{CALLS_END}", f"{CALLS_BEGIN}none{CALLS_END}", []),
        (section(plain("f", "[1]")), section(plain("f", "[1]")), []),
    ],
)
def test_deepseek(
    tool_format: ToolFormat, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert read(tool_format, text) == (content, calls)
