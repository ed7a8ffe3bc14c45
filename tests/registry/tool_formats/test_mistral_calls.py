"""Calls behind ``[TOOL_CALLS]``."""

from __future__ import annotations

import pytest

from millrace.schemas.tools import ToolFormat
from tests.registry.tool_formats.reading import read


@pytest.mark.parametrize("tool_format", [ToolFormat.MISTRAL, ToolFormat.MISTRAL_V11])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("See [1] and [2]. ", "See [1] and [2]. ", []),
        ('[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', "", [("f", '{"a": 1}')]),
        ('Hm.\n[TOOL_CALLS][{"name": "f", "arguments": {}}]', "Hm.", [("f", "{}")]),
        (
            (
                '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "]"}, "id": "abcDEF123"}, '
                '{"name": "g", "arguments": {}, "id": "abcDEF124"}]'
            ),
            "",
            [("f", '{"a": "]"}'), ("g", "{}")],
        ),
        ('[TOOL_CALLS]{"name": "f", "arguments": {}}', "", [("f", "{}")]),
        ('[TOOL_CALLS][{"arguments": {"a": 1}, "name": "f"}] So', "So", [("f", '{"a": 1}')]),
        ('[TOOL_CALLS]f[ARGS]{"a": {"b": "}"}}', "", [("f", '{"a": {"b": "}"}}')]),
        ('I look.[TOOL_CALLS]f{"a": 1}', "I look.", [("f", '{"a": 1}')]),
        (
            "[TOOL_CALLS]f[CALL_ID]abcDEF123[ARGS]{}[TOOL_CALLS]g-2[ARGS] {}\n Done.",
            "Done.",
            [("f", "{}"), ("g-2", "{}")],
        ),
        # Cut off.
        ("Hm [TOOL_", "Hm [TOOL_", []),
        ("Hm [TOOL_CALLS]", "Hm", []),
        ('[TOOL_CALLS] [{"name": "f", "argu', "", []),
        ("[TOOL_CALLS]get_wea", "", []),
        ("[TOOL_CALLS]f[CALL_ID]abc", "", []),
        ("[TOOL_CALLS]f[AR", "", []),
        ('[TOOL_CALLS]f[ARGS]{"a": "b', "", [("f", '{"a": "b')]),
        ('[TOOL_CALLS][{"name": "f", "arguments": {}}, {"na', "", [("f", "{}")]),
        # Not quite JSON.
        ('[TOOL_CALLS]f[ARGS]{"a": [1}}', "", [("f", '{"a": [1}}')]),
        # No calls.
        ("[TOOL_CALLS] Hello there", "[TOOL_CALLS] Hello there", []),
        ("[TOOL_CALLS][1, 2]", "[TOOL_CALLS][1, 2]", []),
        ("[TOOL_CALLS]f[ARGS][1]", "[TOOL_CALLS]f[ARGS][1]", []),
        ("[TOOL_CALLS]f[ID]{}", "[TOOL_CALLS]f[ID]{}", []),
        ("[TOOL_CALLS]f[CALL_ID]!", "[TOOL_CALLS]f[CALL_ID]!", []),
        ("[TOOL_CALLS]?[TOOL_CALLS]f[ARGS]{}", "[TOOL_CALLS]?", [("f", "{}")]),
    ],
)
def test_mistral(
    tool_format: ToolFormat, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert read(tool_format, text) == (content, calls)
