"""One call of a tool as a rule of a grammar, with arguments that fit its schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

from millrace.registry.json_schemas.keeping import UnkeptError, kept_schema
from millrace.registry.tool_formats.argument_rules import (
    GLM_TAGS,
    QWEN_TAGS,
    literal,
    rules_in_python,
    rules_in_tags,
)
from millrace.registry.tool_formats.closed_schema import may_be_closed, with_closed_parts
from millrace.registry.tool_formats.dropped import Dropped, refusal
from millrace.registry.tool_formats.tags import (
    ARGUMENTS_TAG,
    CALL_BEGIN,
    CALL_END,
    FENCE,
    ID_TAG,
    JSON_FENCE,
    SEPARATOR,
)
from millrace.schemas.errors import ParameterError
from millrace.schemas.sampling import SCHEMA_SETTINGS
from millrace.schemas.tools import ToolDefinition, ToolFormat

# As Python's json writes, which is what models have seen.
STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ID = "/[a-zA-Z0-9]{9}/"


def rules_of_call(
    tool_format: ToolFormat, tool: ToolDefinition, number: int, dropped: Dropped
) -> Iterator[str]:
    """The rule ``one_<number>`` and those that it needs. ``dropped`` is told of keywords that the
    rules do not keep. Raises ParameterError for parameters that are not those of an object, or that
    the format cannot write."""
    schema = _schema(tool, dropped)
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
    """In the pieces of JSON, so that it may begin as another answer in JSON does."""
    pieces = ("{", '"name"', ": ", f'"{tool.name}"', ", ", f'"{key}"', ": ")
    return " ".join(map(literal, pieces))


def _schema(tool: ToolDefinition, dropped: Dropped) -> dict[str, Any]:
    """The schema of a tool's arguments, as far as it can be kept."""
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
    """How the values are to be written."""
    return {SCHEMA_SETTINGS: STYLE | {"coerce_one_of": True, "lenient": not tool.strict}}
