"""One call of a tool as a rule of a grammar, with arguments that fit its schema."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from registry.tool_formats.bracket_scanner import ARGUMENTS_TAG, ID_TAG
from registry.tool_formats.flat_schema import FlatSchema, flat_schemas, resolved
from schemas.errors import ParameterError
from schemas.sampling import SCHEMA_SETTINGS
from schemas.tools import ToolDefinition, ToolFormat

# As Python's json writes, which is what models have seen.
STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Where a schema says somewhere else what an object has, it is left open.
_ELSEWHERE = frozenset({"$ref", "allOf", "anyOf", "oneOf", "patternProperties", "propertyNames"})
_KEYWORD = re.compile(r"\w[\w-]*")
_ID = "/[a-zA-Z0-9]{9}/"


def may_be_closed(schema: Mapping[str, Any]) -> bool:
    """Whether a schema of an object leaves open if there are further properties, and speaks of none
    anywhere but under ``properties``."""
    return "additionalProperties" not in schema and _ELSEWHERE.isdisjoint(schema)


def literal(text: str) -> str:
    """A text in the language of grammars."""
    return json.dumps(text, ensure_ascii=False)


def rules_of_call(tool_format: ToolFormat, tool: ToolDefinition, number: int) -> Iterator[str]:
    """The rule ``one_<number>`` and those that it needs. Raises ParameterError for parameters that
    are not those of an object, or that the format cannot write."""
    schema = _schema(tool)
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
        case ToolFormat.PYTHONIC:
            yield from _rules_in_python(tool, number, schema)
            return
    yield f"{arguments}: %json {json.dumps(schema | _settings(tool))}"


_QUOTE = literal('"')


def _quoted(text: str) -> str:
    return literal(f'"{text}"')


def _opening_in_json(tool: ToolDefinition, key: str) -> str:
    """In the pieces of JSON, so that it may begin as another answer in JSON does."""
    pieces = ("{", '"name"', ": ", f'"{tool.name}"', ", ", f'"{key}"', ": ")
    return " ".join(map(literal, pieces))


def _schema(tool: ToolDefinition) -> dict[str, Any]:
    """The schema of a tool's arguments."""
    schema = dict(tool.parameters or {})
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise ParameterError(
            "tools", f"The parameters of the tool {tool.name} must be a schema of type object."
        )
    schema["type"] = "object"
    if may_be_closed(schema):
        schema["additionalProperties"] = False
    return schema


def _settings(tool: ToolDefinition) -> dict[str, Any]:
    """How the values are to be written."""
    return {SCHEMA_SETTINGS: STYLE | {"coerce_one_of": True, "lenient": not tool.strict}}


def _rules_in_python(tool: ToolDefinition, number: int, schema: Mapping[str, Any]) -> Iterator[str]:
    forms = [_possible(tool, form) for form in flat_schemas(schema)]
    calls = []
    for i, form in enumerate(forms):
        prefix = f"{number}_{i}"
        calls.append(
            f"{literal(tool.name)} {literal('(')} {_keywords(prefix, form)} {literal(')')}"
        )
        for j, (name, one) in enumerate(form.properties.items()):
            if not _KEYWORD.fullmatch(name):
                raise ParameterError(
                    "tools",
                    f"The tool {tool.name} has a parameter {name!r:.80}: this model writes names "
                    "of letters, digits, _ and - only.",
                )
            constants = "".join(f" | {word}" for word in _python_constants(one, schema))
            yield f"value_{prefix}_{j}: {literal(f'{name}=')} (json_{prefix}_{j}{constants})"
            yield f"json_{prefix}_{j}: %json {json.dumps(one | _settings(tool))}"
        yield from _keyword_rules(prefix, form)
    yield f"one_{number}: " + " | ".join(calls)


def _possible(tool: ToolDefinition, form: FlatSchema) -> FlatSchema:
    """Without properties that nothing fits."""
    properties = {}
    for name, schema in form.properties.items():
        if schema is False and name in form.required:
            raise ParameterError("tools", f"Nothing fits the parameter {name:.80} of {tool.name}.")
        if schema is not False:
            properties[name] = schema if isinstance(schema, dict) else {}
    return form._replace(properties=properties)


def _keywords(prefix: str, form: FlatSchema) -> str:
    """All arguments of a call."""
    if not form.properties:
        return ""
    return f"first_{prefix}_0" if form.required else f"(first_{prefix}_0)?"


def _keyword_rules(prefix: str, form: FlatSchema) -> Iterator[str]:
    """``first_<prefix>_<i>``: the arguments from the i-th on, of which one must be there;
    ``more_<prefix>_<i>``: those that come behind another one."""
    names = list(form.properties)
    for i, name in enumerate(names):
        value = f"value_{prefix}_{i}"
        another = f"{literal(', ')} {value}"
        is_last = i + 1 == len(names)
        following = "" if is_last else f" more_{prefix}_{i + 1}"
        if name in form.required:
            yield f"first_{prefix}_{i}: {value}{following}"
            yield f"more_{prefix}_{i}: {another}{following}"
        else:
            later = "" if is_last else f" | first_{prefix}_{i + 1}"
            yield f"first_{prefix}_{i}: {value}{following}{later}"
            yield f"more_{prefix}_{i}: ({another})?{following}"


def _python_constants(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Sequence[str]:
    """Those that a value may be and that JSON writes in another way."""
    whole = resolved(schema, root)
    if not isinstance(whole, dict) or not {"enum", "const"}.isdisjoint(whole):
        return ()
    kind = whole.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    words = []
    if "boolean" in kinds:
        words += [literal("True"), literal("False")]
    if "null" in kinds or {"type": "null"} in whole.get("anyOf", ()):
        words.append(literal("None"))
    return words
