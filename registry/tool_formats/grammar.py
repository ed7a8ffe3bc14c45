"""Grammars for tool calls with arguments that fit their schemas."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from millrace.registry.json_schemas.keeping import UnkeptError, kept_schema, refuse
from millrace.registry.tool_formats.argument_rules import (
    GLM_TAGS,
    QWEN_TAGS,
    literal,
    rules_in_python,
    rules_in_tags,
)
from millrace.registry.tool_formats.closed_schema import may_be_closed, with_closed_parts
from millrace.registry.tool_formats.dropped import Dropped, refusal
from millrace.registry.tool_formats.freeform import held_to_patterns
from millrace.registry.tool_formats.tags import (
    ARGUMENTS_TAG,
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    CALLS_TAG,
    CLOSING_TAG,
    FENCE,
    ID_TAG,
    JSON_FENCE,
    OPENING_TAG,
    SEPARATOR,
)
from millrace.schemas.errors import ParameterError
from millrace.schemas.sampling import (
    MAX_GRAMMAR_CHARACTERS,
    SCHEMA_SETTINGS,
    TOOL_MARK,
    Grammar,
    GrammarKind,
)
from millrace.schemas.tools import ToolChoice, ToolDefinition, ToolFormat, ToolMode

# The style of Python's json module, which models know.
STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ID = "/[a-zA-Z0-9]{9}/"


def rules_of_call(
    tool_format: ToolFormat, tool: ToolDefinition, number: int, dropped: Dropped
) -> Iterator[str]:
    """Yield the rule ``one_<number>`` and the rules that it needs.

    ``dropped`` collects the keywords that the rules do not enforce.

    Raises:
        ParameterError: the parameters are not an object, or the format cannot write them.
    """
    schema = _kept_schema_of(tool, dropped)
    arguments = f"arguments_{number}"
    match tool_format:
        case ToolFormat.HERMES:
            yield f"one_{number}: {_opening_in_json(tool, 'arguments')} {arguments} {literal('}')}"
        case ToolFormat.LLAMA3:
            yield f"one_{number}: {_opening_in_json(tool, 'parameters')} {arguments} {literal('}')}"
        case ToolFormat.MISTRAL:
            identity = f"({literal(', ')} {_quoted('id')} {literal(': ')} {_QUOTE} {_ID} {_QUOTE})?"
            opening = _opening_in_json(tool, "arguments")
            yield f"one_{number}: {opening} {arguments} {identity} {literal('}')}"
        case ToolFormat.MISTRAL_V11:
            identity = f"({literal(ID_TAG)} {_ID})?"
            tag = literal(ARGUMENTS_TAG)
            yield f"one_{number}: {literal(tool.name)} {identity} {tag} {arguments}"
        case ToolFormat.DEEPSEEK_V3:
            opening = literal(f"{CALL_BEGIN}function{SEPARATOR}{tool.name}\n{JSON_FENCE}\n")
            closing = literal(f"\n{FENCE}{CALL_END}")
            yield f"one_{number}: {opening} {arguments} {closing}"
        case ToolFormat.DEEPSEEK_V31:
            opening = literal(f"{CALL_BEGIN}{tool.name}{SEPARATOR}")
            yield f"one_{number}: {opening} {arguments} {literal(CALL_END)}"
        case ToolFormat.PYTHONIC:
            yield from rules_in_python(tool, number, schema, _settings(tool))
            return
        case ToolFormat.QWEN3_CODER:
            yield from rules_in_tags(QWEN_TAGS, tool, number, schema, _settings(tool), dropped)
            return
        case ToolFormat.GLM45:
            yield from rules_in_tags(GLM_TAGS, tool, number, schema, _settings(tool), dropped)
            return
    yield f"{arguments}: %json {json.dumps(schema | _settings(tool))}"


_QUOTE = literal('"')


def _quoted(text: str) -> str:
    return literal(f'"{text}"')


def _opening_in_json(tool: ToolDefinition, key: str) -> str:
    """Return the opening in JSON pieces, so that it may share its beginning with another JSON
    answer.
    """
    pieces = ("{", '"name"', ": ", f'"{tool.name}"', ", ", f'"{key}"', ": ")
    return " ".join(map(literal, pieces))


def _kept_schema_of(tool: ToolDefinition, dropped: Dropped) -> dict[str, Any]:
    """Return the schema of a tool's arguments, as far as it can be enforced."""
    schema = dict(tool.parameters or {})
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise ParameterError(
            "tools", f"The parameters of the tool {tool.name} must be a schema of type object."
        )
    schema["type"] = "object"
    if may_be_closed(schema):
        schema["additionalProperties"] = False
    try:
        closed = schema if tool.strict else with_closed_parts(schema)
        return kept_schema(closed, partial(dropped.add, tool))
    except UnkeptError as error:
        raise refusal(tool, error.unkept) from error
    except RecursionError as error:
        raise ParameterError(
            "tools", f"The parameters of the tool {tool.name} are nested too deeply."
        ) from error


def _settings(tool: ToolDefinition) -> dict[str, Any]:
    """Return the settings for the style of values."""
    return {SCHEMA_SETTINGS: STYLE | {"coerce_one_of": True, "lenient": not tool.strict}}


_ANNOTATIONS = frozenset(
    {
        *("title", "description", "examples", "default", "$comment", "deprecated"),
        *("readOnly", "writeOnly"),
    }
)
_BY_NAME = frozenset(
    {
        *("properties", "patternProperties", "$defs", "definitions"),
        *("dependentSchemas", "dependencies"),
    }
)
_VALUES = frozenset({"const", "enum", SCHEMA_SETTINGS})
MAX_PARALLEL_CALLS = 16


def without_annotations(tool: ToolDefinition) -> ToolDefinition:
    """Return the tool without the annotations of its parameters. Descriptions make up most of many
    schemas, and the length of a grammar is limited.
    """
    parameters = None if tool.parameters is None else _bare(tool.parameters)
    return msgspec.structs.replace(tool, parameters=parameters)


def _bare(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_bare(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _ANNOTATIONS:
            continue
        if key in _BY_NAME and isinstance(value, dict):
            found[key] = {name: _bare(one) for name, one in value.items()}
        else:
            found[key] = value if key in _VALUES else _bare(value)
    return found


class _Layout(NamedTuple):
    """Layout around calls, in the grammar language.

    ``before`` precedes the first call, ``joint`` separates calls, and ``after`` follows the last
    one. All calls follow one ``tag``; with ``each``, every call has its own tag and surroundings.
    Without a tag the whole completion is calls, and ``first`` is the character with which no other
    answer begins.
    """

    before: str = ""
    joint: str = ""
    after: str = ""
    tag: str = ""
    each: bool = False
    first: str = ""


_IN_TAGS = _Layout(
    literal("\n"),
    literal("\n"),
    literal("\n" + CLOSING_TAG),
    tag=literal(OPENING_TAG),
    each=True,
)
_SECTION = _Layout(after=literal(CALLS_END), tag=literal(CALLS_BEGIN))
_LAYOUTS = {
    ToolFormat.HERMES: _IN_TAGS,
    ToolFormat.LLAMA3: _Layout(joint='"; "', first="{"),
    ToolFormat.PYTHONIC: _Layout('"["', '", "', '"]"', first=r"\["),
    ToolFormat.MISTRAL: _Layout('" "? "["', '", "', '"]"', tag=literal(CALLS_TAG)),
    ToolFormat.MISTRAL_V11: _Layout(tag=literal(CALLS_TAG), each=True),
    ToolFormat.QWEN3_CODER: _IN_TAGS,
    ToolFormat.DEEPSEEK_V3: _SECTION._replace(joint=literal("\n")),
    ToolFormat.DEEPSEEK_V31: _SECTION,
    ToolFormat.GLM45: _Layout(
        joint=literal("\n") + "?", after=literal(CLOSING_TAG), tag=literal(OPENING_TAG), each=True
    ),
}


def call_grammar(
    tool_format: ToolFormat,
    tools: Sequence[ToolDefinition],
    choice: ToolChoice,
    parallel: bool,
    answer: Grammar | None = None,
    patterns: Mapping[str, str] = {},
    dropped: Dropped | None = None,
) -> Grammar | None:
    """Return the grammar that the completion must match for ``choice``; None if it is free.

    - REQUIRED and NAMED: one call, or several if ``parallel``, and nothing else.
    - AUTO: calls, or a completion that matches ``answer``. Without ``answer`` the completion is
      free, unless a tool is ``strict`` or calls are not ``parallel``; then it is content and calls
      that fit.
    - NONE: ``answer``.

    Arguments have no properties beyond those in their schema. The input of a tool in ``patterns``
    is text that matches the regular expression; empty: any text. ``dropped`` collects the keywords
    of tools that are not strict and that the grammar does not enforce.

    Raises:
        ParameterError: the chosen tool does not exist; parameters are not an object; an answer
            beside calls is not JSON; or the schemas are too large together.
    """
    if choice.mode is ToolMode.NONE or (choice.mode is ToolMode.AUTO and not tools):
        return answer
    layout = _LAYOUTS[tool_format]
    alone = choice.mode is ToolMode.AUTO and parallel and answer is None
    tools = held_to_patterns(tools, patterns, tool_format, alone=alone)
    tools = tuple(map(without_annotations, tools))
    dropped = Dropped() if dropped is None else dropped
    if choice.mode is ToolMode.AUTO:
        if answer is not None:
            frame = _calls_only(layout, parallel, " | answer")
            return _grammar([frame, _answer(answer)], tool_format, tools, dropped)
        if parallel and not any(tool.strict for tool in tools):
            return None
        return _grammar([_free(layout, parallel)], tool_format, tools, dropped)
    if choice.mode is ToolMode.NAMED:
        tools = [tool for tool in tools if tool.name == choice.name]
    if not tools:
        raise ParameterError(
            "tool_choice",
            f"tool_choice names {choice.name!r:.80}, which is not one of the tools."
            if choice.mode is ToolMode.NAMED
            else f"tool_choice {choice.mode} needs tools to choose from.",
        )
    return _grammar([_calls_only(layout, parallel, "")], tool_format, tools, dropped)


def _calls_only(layout: _Layout, parallel: bool, or_answer: str) -> str:
    """Return the rules of a completion that is calls, or an answer of another form if ``or_answer``
    allows it.
    """
    if layout.each:
        others = _others(f"{layout.joint} call", parallel)
        return (
            f"start: call{others}{or_answer}\n"
            f"call: {layout.tag} rest\n"
            f"rest: {layout.before} one {layout.after}"
        )
    return f"start: calls{or_answer}\ncalls: {layout.tag} {_list(layout, parallel)}"


def _free(layout: _Layout, parallel: bool) -> str:
    """Return the rules of a completion with content and calls. The lexer takes ``tag`` as soon as
    it appears, so TEXT never contains a tag.
    """
    if not layout.tag:
        return (
            f"start: (calls | TEXT)?\ncalls: {_list(layout, parallel)}\n"
            rf"TEXT: /[ \t\r\n]*[^{layout.first} \t\r\n](.|\n)*/"
        )
    start = "(tag rest)* TEXT" if layout.each and parallel else "TEXT | tag rest"
    rest = f"{layout.before} one {layout.after}" if layout.each else _list(layout, parallel)
    return f"start: {start}\ntag[lazy]: TEXT {layout.tag}\nTEXT: /(.|\\n)*/\nrest: {rest}"


def _list(layout: _Layout, parallel: bool) -> str:
    return f"{layout.before} one{_others(f'{layout.joint} one', parallel)} {layout.after}"


def _others(another: str, parallel: bool) -> str:
    return f" ({another}){{0,{MAX_PARALLEL_CALLS - 1}}}" if parallel else ""


def _answer(answer: Grammar) -> str:
    """Return the rule of a JSON answer."""
    if answer.kind is GrammarKind.JSON_OBJECT:
        schema: Any = {"type": "object"}
    elif answer.kind is GrammarKind.JSON_SCHEMA:
        try:
            schema = json.loads(answer.text)
        except (ValueError, RecursionError) as error:
            raise ParameterError("response_format", f"The schema is not JSON: {error}.") from error
    else:
        raise ParameterError(
            "tools",
            f"A {answer.kind} grammar is not allowed with tools, unless tool_choice is none.",
        )
    if isinstance(schema, dict):
        try:
            schema = kept_schema(schema, refuse)
        except UnkeptError as error:
            raise ParameterError(
                "response_format", f"The schema cannot be enforced: {error}."
            ) from error
        except RecursionError as error:
            raise ParameterError("response_format", "The schema is nested too deeply.") from error
        settings = schema.get(SCHEMA_SETTINGS, {})
        if not isinstance(settings, dict):
            raise ParameterError(
                "response_format", f"{SCHEMA_SETTINGS} of the schema must be an object."
            )
        style: dict[str, Any] = {"coerce_one_of": True}
        if "whitespace_pattern" not in settings:
            style |= STYLE
        schema = schema | {SCHEMA_SETTINGS: style | settings}
    return f"answer: %json {json.dumps(schema)}"


def _grammar(
    rules: list[str],
    tool_format: ToolFormat,
    tools: Sequence[ToolDefinition],
    dropped: Dropped,
) -> Grammar:
    # Check first, so that oversized schemas are not processed.
    _check_length(sum(len(json.dumps(tool.parameters or {})) for tool in tools))
    lines = [*rules, "one: " + " | ".join(f"one_{i}" for i in range(len(tools)))]
    for i, tool in enumerate(tools):
        lines.append(TOOL_MARK + tool.name)
        lines += rules_of_call(tool_format, tool, i, dropped)
    text = "\n".join(line.strip() for line in lines) + "\n"
    _check_length(len(text))
    return Grammar(kind=GrammarKind.EBNF, text=text)


def _check_length(num_characters: int) -> None:
    if num_characters > MAX_GRAMMAR_CHARACTERS:
        raise ParameterError(
            "tools",
            f"The tools' schemas are too large to have calls follow them: {num_characters} "
            f"characters of at most {MAX_GRAMMAR_CHARACTERS}. Give fewer or smaller tools.",
        )
