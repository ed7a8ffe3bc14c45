"""Tool support of a chat template: its format of calls, and the form that it needs for earlier
calls.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from millrace.registry.tool_formats.tags import (
    ARGUMENTS_TAG,
    CALLS_TAG,
    JSON_FENCE,
    KEY_TAG,
    OPENING_TAG,
    PARAMETER_TAG,
    SEPARATOR,
)
from millrace.schemas.tools import ToolFormat

# The form in templates that describe Python calls: [name(parameter=value, …)].
_CALL_IN_PYTHON = re.compile(r"\[[A-Za-z_]\w*\([A-Za-z_]\w*=")


def format_shown(source: str) -> ToolFormat | None:
    """Return the format of calls in a template that takes tools; None if it is unknown."""
    if CALLS_TAG in source:
        return ToolFormat.MISTRAL_V11 if ARGUMENTS_TAG in source else ToolFormat.MISTRAL
    if SEPARATOR in source:
        return ToolFormat.DEEPSEEK_V3 if JSON_FENCE in source else ToolFormat.DEEPSEEK_V31
    if KEY_TAG in source:
        return ToolFormat.GLM45
    if OPENING_TAG in source:
        return ToolFormat.QWEN3_CODER if PARAMETER_TAG in source else ToolFormat.HERMES
    if _CALL_IN_PYTHON.search(source):
        return ToolFormat.PYTHONIC
    if "python_tag" in source or '"parameters"' in source:
        return ToolFormat.LLAMA3
    return None


_ID = "probe0001"
_NAME, _KEY, _VALUE = "probe_call", "probe_key", "probe_value"
_TEXT = "probe text"
_TOLD_WRONG = (f"'{_KEY}'", f'\\"{_KEY}')


class CallStyle(NamedTuple):
    """Form in which a template needs earlier calls.

    ``arguments_as_text``: arguments are JSON text instead of an object. ``without_content``:
    content is None without text beside calls. ``apart``: text and calls are separate messages.
    ``short_ids``: ids have nine letters and digits.
    """

    arguments_as_text: bool = False
    without_content: bool = False
    apart: bool = False
    short_ids: bool = False


def call_style_of(render: Callable[[list[dict[str, Any]]], str]) -> CallStyle:
    """Find a template's form by trying it.

    ``render`` returns the prompt of a conversation, empty if the template refuses it. Of the forms
    that show a call with its argument, as JSON or one by one, the one with the shortest prompt is
    best.
    """
    ways = itertools.starmap(CallStyle, itertools.product((False, True), repeat=2))
    shown = [(len(text), way) for way in ways if _shows_call(text := render(_probe(way, "")))]
    if not shown:
        return CallStyle()
    _, best = min(shown, key=lambda one: one[0])
    return best._replace(apart=not _shows_call(render(_probe(best, _TEXT))))


def _probe(way: CallStyle, text: str) -> list[dict[str, Any]]:
    arguments: Any = f'{{"{_KEY}": "{_VALUE}"}}' if way.arguments_as_text else {_KEY: _VALUE}
    content = text or (None if way.without_content else "")
    call = {"id": _ID, "type": "function", "function": {"name": _NAME, "arguments": arguments}}
    return [
        {"role": "user", "content": _TEXT},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "content": _TEXT, "tool_call_id": _ID, "name": _NAME},
    ]


def _shows_call(text: str) -> bool:
    return all(part in text for part in (_NAME, _KEY, _VALUE)) and not any(
        wrong in text for wrong in _TOLD_WRONG
    )
