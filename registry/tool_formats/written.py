"""Calls as a model of each format writes them, and how it is told to."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from millrace.registry.tool_formats.python_literals import as_literal
from millrace.registry.tool_formats.scanners.deepseek_calls import (
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    FENCE,
    JSON_FENCE,
    SEPARATOR,
)
from millrace.registry.tool_formats.scanners.mistral_calls import ARGUMENTS_TAG, CALLS_TAG
from millrace.registry.tool_formats.scanners.xml_calls import (
    CLOSING_TAG,
    FUNCTION_END,
    FUNCTION_TAG,
    KEY_END,
    KEY_TAG,
    OPENING_TAG,
    PARAMETER_END,
    PARAMETER_TAG,
    VALUE_END,
    VALUE_TAG,
)
from millrace.schemas.tools import ToolCall, ToolFormat

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
    ToolFormat.QWEN3_CODER: (
        "To call a tool, write its name and each of its arguments between tags, one pair of "
        f"{OPENING_TAG} for each call:\n"
        f"{OPENING_TAG}\n{FUNCTION_TAG}<name>>\n{PARAMETER_TAG}<argument>>\n<value>\n"
        f"{PARAMETER_END}\n{FUNCTION_END}\n{CLOSING_TAG}\n"
    ),
    ToolFormat.DEEPSEEK_V3: (
        "To call tools, write their names and their arguments as JSON between tags:\n"
        f"{CALLS_BEGIN}{CALL_BEGIN}function{SEPARATOR}<name>\n{JSON_FENCE}\n"
        f"<object of arguments>\n{FENCE}{CALL_END}{CALLS_END}\n"
    ),
    ToolFormat.DEEPSEEK_V31: (
        "To call tools, write their names and their arguments as JSON between tags:\n"
        f"{CALLS_BEGIN}{CALL_BEGIN}<name>{SEPARATOR}<object of arguments>{CALL_END}{CALLS_END}\n"
    ),
    ToolFormat.GLM45: (
        "To call a tool, write its name and each of its arguments between tags, one pair of "
        f"{OPENING_TAG} for each call:\n"
        f"{OPENING_TAG}<name>\n{KEY_TAG}<argument>{KEY_END}\n{VALUE_TAG}<value>{VALUE_END}\n"
        f"{CLOSING_TAG}\n"
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
        case ToolFormat.QWEN3_CODER:
            return "\n".join(map(_in_qwen_s_tags, calls))
        case ToolFormat.DEEPSEEK_V3:
            told = (
                f"{CALL_BEGIN}function{SEPARATOR}{call.name}\n{JSON_FENCE}\n{call.arguments}\n"
                f"{FENCE}{CALL_END}"
                for call in calls
            )
            return CALLS_BEGIN + "\n".join(told) + CALLS_END
        case ToolFormat.DEEPSEEK_V31:
            told = (
                f"{CALL_BEGIN}{call.name}{SEPARATOR}{call.arguments}{CALL_END}" for call in calls
            )
            return CALLS_BEGIN + "".join(told) + CALLS_END
        case ToolFormat.GLM45:
            return "\n".join(map(_in_glm_s_tags, calls))


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


def _in_qwen_s_tags(call: ToolCall) -> str:
    parameters = (
        f"{PARAMETER_TAG}{name}>\n{value}\n{PARAMETER_END}\n" for name, value in _as_texts(call)
    )
    inner = f"{FUNCTION_TAG}{call.name}>\n{''.join(parameters)}{FUNCTION_END}"
    return f"{OPENING_TAG}\n{inner}\n{CLOSING_TAG}"


def _in_glm_s_tags(call: ToolCall) -> str:
    pairs = (
        f"{KEY_TAG}{name}{KEY_END}\n{VALUE_TAG}{value}{VALUE_END}\n"
        for name, value in _as_texts(call)
    )
    return f"{OPENING_TAG}{call.name}\n{''.join(pairs)}{CLOSING_TAG}"


def _as_texts(call: ToolCall) -> Iterator[tuple[str, str]]:
    """Each argument, and its value as plain text; none of those that are no object."""
    arguments = arguments_of(call)
    if isinstance(arguments, dict):
        for name, value in arguments.items():
            is_text = isinstance(value, str)
            yield name, value if is_text else json.dumps(value, ensure_ascii=False)
