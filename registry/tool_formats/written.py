"""Calls as a model of each format writes them, and how it is told to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from registry.tool_formats.bracket_scanner import ARGUMENTS_TAG, CALLS_TAG
from registry.tool_formats.python_literals import as_literal
from schemas.tools import ToolCall, ToolFormat

INSTRUCTIONS = {
    ToolFormat.HERMES: (
        "To call a tool, write its name and arguments as JSON between tags, one pair of tags for "
        'each call:\n<tool_call>\n{"name": <name>, "arguments": <object of arguments>}\n'
        "</tool_call>\n"
    ),
    ToolFormat.LLAMA3: (
        "To call a tool, answer with nothing but its name and arguments as JSON, with a semicolon "
        'between several calls:\n{"name": <name>, "parameters": <object of arguments>}\n'
    ),
    ToolFormat.PYTHONIC: (
        "To call tools, answer with nothing but a list of calls as Python writes them, with "
        "literals for arguments:\n[<name>(<argument>=<value>, <argument>=<value>), <name>()]\n"
    ),
    ToolFormat.MISTRAL: (
        "To call tools, write a list of their names and arguments as JSON behind a tag:\n"
        f'{CALLS_TAG}[{{"name": <name>, "arguments": <object of arguments>}}]\n'
    ),
    ToolFormat.MISTRAL_V11: (
        "To call a tool, write its name and then its arguments as JSON, each behind its tag:\n"
        f"{CALLS_TAG}<name>{ARGUMENTS_TAG}<object of arguments>\n"
    ),
}


def calls_as_text(calls: Sequence[ToolCall], tool_format: ToolFormat) -> str:
    """What a model of this format writes to make these calls."""
    match tool_format:
        case ToolFormat.HERMES:
            return "\n".join(
                f"<tool_call>\n{_in_json(call, 'arguments')}\n</tool_call>" for call in calls
            )
        case ToolFormat.LLAMA3:
            return "; ".join(_in_json(call, "parameters") for call in calls)
        case ToolFormat.PYTHONIC:
            return "[" + ", ".join(map(_in_python, calls)) + "]"
        case ToolFormat.MISTRAL:
            return f"{CALLS_TAG}[" + ", ".join(_in_json(call, "arguments") for call in calls) + "]"
        case ToolFormat.MISTRAL_V11:
            return "".join(
                f"{CALLS_TAG}{call.name}{ARGUMENTS_TAG}{call.arguments}" for call in calls
            )


def arguments_of(call: ToolCall) -> Any:
    """The object that arguments are the JSON of; the text itself if there is none."""
    try:
        value = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return call.arguments
    return value if isinstance(value, dict) else call.arguments


def _in_json(call: ToolCall, key: str) -> str:
    return f'{{"name": "{call.name}", "{key}": {call.arguments}}}'


def _in_python(call: ToolCall) -> str:
    arguments = arguments_of(call)
    if isinstance(arguments, str):
        return f"{call.name}({arguments})"
    return f"{call.name}({', '.join(f'{key}={as_literal(arguments[key])}' for key in arguments)})"
