"""Grammars that have a model call tools, with arguments that fit their schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from schemas.errors import ParameterError
from schemas.sampling import MAX_GRAMMAR_CHARACTERS, SCHEMA_SETTINGS, Grammar, GrammarKind
from schemas.tools import ToolChoice, ToolDefinition, ToolFormat, ToolMode

MAX_PARALLEL_CALLS = 16

# As Python's json writes, which is what models have seen.
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Where a schema says somewhere else what an object has, it is left open.
_ELSEWHERE = frozenset({"$ref", "allOf", "anyOf", "oneOf", "patternProperties", "propertyNames"})

# What a completion is: calls, and instead of them an answer of another form, if there may be one.
_HERMES_FORCED = r"""
start: call{others}{or_answer}
call: "<tool_call>" rest
rest: "\n" one "\n</tool_call>"
"""
_LLAMA3_FORCED = r"""
start: calls{or_answer}
calls: one{others}
"""
# Content and calls. The lexer takes `tag` as soon as it is there: no tag is ever a part of TEXT.
_HERMES_FREE = r"""
start: {start}
tag[lazy]: TEXT "<tool_call>"
TEXT: /(.|\n)*/
rest: "\n" one "\n</tool_call>"
"""
_LLAMA3_FREE = r"""
start: (calls | TEXT)?
calls: one{others}
TEXT: /[ \t\r\n]*[^{{ \t\r\n](.|\n)*/
"""


def call_grammar(
    tool_format: ToolFormat,
    tools: Sequence[ToolDefinition],
    choice: ToolChoice,
    parallel: bool,
    answer: Grammar | None = None,
) -> Grammar | None:
    """What the completion must match for ``choice``; None if it is free.

    REQUIRED and NAMED: one call, or several if ``parallel``, and nothing else. AUTO: calls, or a
    completion that matches ``answer``; without one it is free unless a tool is ``strict`` or calls
    are not ``parallel``: then it is content and calls that fit. NONE: ``answer``. Arguments have no
    properties that their schema does not speak of.

    Raises ParameterError for a choice of tools that there are not, parameters that are not those
    of an object, an answer of another form than JSON besides calls, and schemas that are too large
    together.
    """
    if choice.mode is ToolMode.NONE or (choice.mode is ToolMode.AUTO and not tools):
        return answer
    if choice.mode is ToolMode.AUTO:
        if answer is not None:
            frame = _calls_only(tool_format, parallel, " | answer")
            return _grammar([frame, _answer(answer)], tool_format, tools)
        if parallel and not any(tool.strict for tool in tools):
            return None
        return _grammar([_free(tool_format, parallel)], tool_format, tools)
    if choice.mode is ToolMode.NAMED:
        tools = [tool for tool in tools if tool.name == choice.name]
    if not tools:
        raise ParameterError(
            "tool_choice",
            f"tool_choice names {choice.name!r:.80}, which is none of the tools."
            if choice.mode is ToolMode.NAMED
            else f"tool_choice {choice.mode} needs tools to choose from.",
        )
    return _grammar([_calls_only(tool_format, parallel, "")], tool_format, tools)


def may_be_closed(schema: Mapping[str, Any]) -> bool:
    """Whether a schema of an object leaves open if there are further properties, and speaks of none
    anywhere but under ``properties``."""
    return "additionalProperties" not in schema and _ELSEWHERE.isdisjoint(schema)


def _calls_only(tool_format: ToolFormat, parallel: bool, or_answer: str) -> str:
    if tool_format is ToolFormat.LLAMA3:
        others = _others('"; " one', parallel)
        return _LLAMA3_FORCED.format(others=others, or_answer=or_answer)
    others = _others(r'"\n" call', parallel)
    return _HERMES_FORCED.format(others=others, or_answer=or_answer)


def _free(tool_format: ToolFormat, parallel: bool) -> str:
    if tool_format is ToolFormat.LLAMA3:
        return _LLAMA3_FREE.format(others=_others('"; " one', parallel))
    return _HERMES_FREE.format(start="(tag rest)* TEXT" if parallel else "TEXT | tag rest")


def _others(another: str, parallel: bool) -> str:
    return f" ({another}){{0,{MAX_PARALLEL_CALLS - 1}}}" if parallel else ""


def _answer(answer: Grammar) -> str:
    """The rule of an answer that is JSON."""
    if answer.kind is GrammarKind.JSON_OBJECT:
        schema: Any = {"type": "object"}
    elif answer.kind is GrammarKind.JSON_SCHEMA:
        try:
            schema = json.loads(answer.text)
        except (ValueError, RecursionError) as error:
            raise ParameterError("response_format", f"The schema is no JSON: {error}.") from error
    else:
        raise ParameterError(
            "tools",
            f"A {answer.kind} grammar does not go with tools, unless tool_choice is none.",
        )
    if isinstance(schema, dict):
        settings = schema.get(SCHEMA_SETTINGS, {})
        if not isinstance(settings, dict):
            raise ParameterError(
                "response_format", f"{SCHEMA_SETTINGS} of the schema must be an object."
            )
        style = {} if "whitespace_pattern" in settings else _STYLE
        schema = schema | {SCHEMA_SETTINGS: style | settings}
    return f"answer: %json {json.dumps(schema)}"


def _grammar(rules: list[str], tool_format: ToolFormat, tools: Sequence[ToolDefinition]) -> Grammar:
    key = "arguments" if tool_format is ToolFormat.HERMES else "parameters"
    lines = [*rules, "one: " + " | ".join(f"one_{i}" for i in range(len(tools)))]
    for i, tool in enumerate(tools):
        # In the pieces of JSON, so that it may begin as another answer in JSON does.
        pieces = ("{", '"name"', ": ", f'"{tool.name}"', ", ", f'"{key}"', ": ")
        opening = " ".join(json.dumps(piece) for piece in pieces)
        lines.append(f'one_{i}: {opening} arguments_{i} "}}"')
        lines.append(f"arguments_{i}: %json {json.dumps(_schema(tool))}")
    text = "\n".join(line.strip() for line in lines) + "\n"
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        raise ParameterError(
            "tools",
            f"The tools' schemas are too large to have calls follow them: {len(text)} characters "
            f"of at most {MAX_GRAMMAR_CHARACTERS}. Give fewer or smaller tools.",
        )
    return Grammar(kind=GrammarKind.EBNF, text=text)


def _schema(tool: ToolDefinition) -> dict[str, Any]:
    """The schema of a tool's arguments, with how they are to be written."""
    schema = dict(tool.parameters or {})
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise ParameterError(
            "tools", f"The parameters of the tool {tool.name} must be a schema of type object."
        )
    schema["type"] = "object"
    if may_be_closed(schema):
        schema["additionalProperties"] = False
    schema[SCHEMA_SETTINGS] = _STYLE | {"coerce_one_of": True, "lenient": not tool.strict}
    return schema
