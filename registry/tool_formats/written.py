"""Calls as text in the format of each model, and the instructions for writing them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from millrace.registry.template_text import TemplateText, filled, joined, literal
from millrace.registry.tool_formats.python_literals import as_literal
from millrace.registry.tool_formats.tags import (
    ARGUMENTS_TAG,
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    CALLS_TAG,
    CLOSING_TAG,
    FENCE,
    FUNCTION_END,
    FUNCTION_TAG,
    JSON_FENCE,
    KEY_END,
    KEY_TAG,
    OPENING_TAG,
    PARAMETER_END,
    PARAMETER_TAG,
    SEPARATOR,
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


class _Form(NamedTuple):
    """Form of a call, the separator of calls, and the text around all of them."""

    each: str
    joint: str = "\n"
    around: str = "{calls}"


_SECTION = f"{CALLS_BEGIN}{{calls}}{CALLS_END}"
_FORMS = {
    ToolFormat.HERMES: _Form("<tool_call>\n{json}\n</tool_call>"),
    ToolFormat.LLAMA3: _Form("{json}", "; "),
    ToolFormat.PYTHONIC: _Form("{python}", ", ", "[{calls}]"),
    ToolFormat.MISTRAL: _Form("{json}", ", ", f"{CALLS_TAG}[{{calls}}]"),
    ToolFormat.MISTRAL_V11: _Form(f"{CALLS_TAG}{{name}}{ARGUMENTS_TAG}{{arguments}}", ""),
    ToolFormat.QWEN3_CODER: _Form(
        f"{OPENING_TAG}\n{FUNCTION_TAG}{{name}}>\n{{values}}{FUNCTION_END}\n{CLOSING_TAG}"
    ),
    ToolFormat.DEEPSEEK_V3: _Form(
        f"{CALL_BEGIN}function{SEPARATOR}{{name}}\n{JSON_FENCE}\n{{arguments}}\n{FENCE}{CALL_END}",
        around=_SECTION,
    ),
    ToolFormat.DEEPSEEK_V31: _Form(
        f"{CALL_BEGIN}{{name}}{SEPARATOR}{{arguments}}{CALL_END}", "", _SECTION
    ),
    ToolFormat.GLM45: _Form(f"{OPENING_TAG}{{name}}\n{{values}}{CLOSING_TAG}"),
}
_VALUES = {
    ToolFormat.QWEN3_CODER: f"{PARAMETER_TAG}{{name}}>\n{{value}}\n{PARAMETER_END}\n",
    ToolFormat.GLM45: f"{KEY_TAG}{{name}}{KEY_END}\n{VALUE_TAG}{{value}}{VALUE_END}\n",
}


def calls_as_text(calls: Sequence[ToolCall], tool_format: ToolFormat) -> TemplateText:
    """Return these calls as a model of this format writes them; names and arguments are content."""
    form = _FORMS[tool_format]
    key = "parameters" if tool_format is ToolFormat.LLAMA3 else "arguments"
    told = literal(form.joint).join(
        filled(
            form.each,
            name=call.name,
            arguments=call.arguments,
            json=_in_json(call, key),
            python=_in_python(call),
            values=joined(
                filled(_VALUES.get(tool_format, ""), name=name, value=value)
                for name, value in _as_texts(call)
            ),
        )
        for call in calls
    )
    return filled(form.around, calls=told)


def arguments_of(call: ToolCall) -> Any:
    """Return the object in the arguments' JSON; the text itself if there is none."""
    try:
        value = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return call.arguments
    return value if isinstance(value, dict) else call.arguments


def _in_json(call: ToolCall, key: str) -> TemplateText:
    form = '"name": "{name}", "{key}": {arguments}'
    told = filled(form, name=call.name, key=literal(key), arguments=call.arguments)
    return joined((literal("{"), told, literal("}")))


def _in_python(call: ToolCall) -> TemplateText:
    arguments = arguments_of(call)
    if not isinstance(arguments, str):
        pairs = (f"{key}={as_literal(arguments[key])}" for key in arguments)
        arguments = ", ".join(pairs)
    return filled("{name}({arguments})", name=call.name, arguments=arguments)


def _as_texts(call: ToolCall) -> Iterator[tuple[str, str]]:
    """Yield each argument with its value as plain text; nothing if the arguments are not an
    object.
    """
    arguments = arguments_of(call)
    if isinstance(arguments, dict):
        for name, value in arguments.items():
            is_text = isinstance(value, str)
            yield name, value if is_text else json.dumps(value, ensure_ascii=False)
