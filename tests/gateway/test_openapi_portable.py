"""No part of the OpenAPI document is of a kind that a generator of clients cannot read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from openapi_spec_validator import validate

from millrace.gateway.openapi.document import openapi_text, websocket_schema
from millrace.gateway.openapi.portable import Components, Use

Json = dict[str, Any]
Place = tuple[str, ...]

_TYPE_OF = {"string": str, "integer": int, "number": float, "boolean": bool}
_WITHIN = ("items", "additionalProperties")
_MADE = (
    "Response",
    "Result",
    "Params",
    "Body",
    "JSONRequestBody",
    "Data",
    "Error",
    "Errors",
)
# Types that generated clients bring themselves.
_THEIRS = {"client", "response", "request", "file", "error", "configuration", "apierror", "unset"}


def _document() -> Json:
    document: Json = json.loads(openapi_text())
    return document


def _schemas(document: Json) -> Iterator[tuple[Place, Json]]:
    """Yield each schema of the document with its place: components, parameters, headers, bodies."""
    for name, schema in document["components"]["schemas"].items():
        yield from _within(("components", name), schema)
    yield from _in_messages(("components",), {**document["components"], "schemas": {}})
    yield from _in_messages(("paths",), document["paths"])


def _in_messages(place: Place, node: Any) -> Iterator[tuple[Place, Json]]:
    if isinstance(node, list):
        for i, part in enumerate(node):
            yield from _in_messages((*place, str(i)), part)
    elif isinstance(node, dict):
        for key, part in node.items():
            if key == "schema":
                yield from _within((*place, key), part)
            elif key != "example":
                yield from _in_messages((*place, key), part)


def _within(place: Place, schema: Json) -> Iterator[tuple[Place, Json]]:
    yield place, schema
    for name, field in schema.get("properties", {}).items():
        yield from _within((*place, "properties", name), field)
    for key in _WITHIN:
        if isinstance(schema.get(key), dict):
            yield from _within((*place, key), schema[key])
    for key in ("anyOf", "oneOf"):
        for i, option in enumerate(schema.get(key, ())):
            yield from _within((*place, key, str(i)), option)


def _faults(place: Place, schema: Json) -> Iterator[str]:
    """Yield parts of this schema that some generator cannot read."""
    kind = schema.get("type")
    is_component = len(place) == 2
    options = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    values = [option for option in options if option != {"type": "null"}]
    if "enum" in schema:
        if kind not in _TYPE_OF or not all(type(one) is _TYPE_OF[kind] for one in schema["enum"]):
            yield "an enumeration whose values are not all of its type"
        if len(schema["enum"]) < 2:
            yield "an enumeration of one value is a const"
        if is_component:
            yield "an enumeration is a component: Go has its values twice in a package"
    if "const" in schema and (kind not in _TYPE_OF or type(schema["const"]) is not _TYPE_OF[kind]):
        yield "a const without its type"
    if kind == "null" and "anyOf" not in place[-2:] and "oneOf" not in place[-2:]:
        yield "null alone"
    if kind == "array" and "items" not in schema:
        yield "an array without items"
    if kind == "object" and not schema.keys() & {"properties", "additionalProperties"}:
        yield "an object that says nothing of its fields"
    if "properties" in schema and not is_component:
        yield "an object with fields that is not a component"
    if "default" in schema and (schema["default"] is None or options or "$ref" in schema):
        yield "a default that is null, of a union or of a reference"
    if (options or is_component) and not schema.get("title"):
        yield "no title"
    if len(values) > 1 and not is_component:
        yield "a union that is not a component"
    if options and not values:
        yield "a union of nothing"
    if any(option.get("type") == "object" for option in values):
        yield "an object without a name in a union"
    if any("anyOf" in option or "oneOf" in option for option in values):
        yield "a union in a union"
    if isinstance(kind, list) and (len(kind) != 2 or kind[1] != "null" or "enum" in schema):
        yield "several types that are not one type or null"
    if schema.keys() & {"prefixItems", "allOf", "not", "patternProperties", "if"}:
        yield "a keyword that generators pass over"


def test_a_validator_finds_nothing() -> None:
    validate(_document())


def test_generators_can_read_every_schema() -> None:
    found = [
        f"{'/'.join(place)}: {fault}"
        for place, schema in _schemas(_document())
        for fault in _faults(place, schema)
    ]
    assert not found, "\n".join(found)


def test_generators_can_read_the_messages_of_the_socket() -> None:
    schemas = websocket_schema()["$defs"]
    found = [
        f"{'/'.join(place)}: {fault}"
        for name, schema in schemas.items()
        for place, part in _within(("$defs", name), schema)
        for fault in _faults(place, part)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": ["a", "b"]},
        {"type": "string", "enum": ["a", None]},
        {"type": "array", "enum": [[], ["text"]]},
        {"type": "null"},
        {"type": "array"},
        {"type": "object"},
        {"anyOf": [{"type": "string"}, {"type": "null"}], "title": "A", "default": ""},
        {"type": "string", "default": None},
        {"anyOf": [{"type": "string"}, {"type": "array", "items": {}}], "title": "A"},
        {"type": "object", "properties": {}},
        {"anyOf": [{"$ref": "#/components/schemas/A"}, {"type": "null"}]},
    ],
)
def test_each_kind_of_fault_is_found(schema: Json) -> None:
    assert list(_faults(("components", "A", "properties", "b"), schema))


def test_fields_of_requests_have_no_default() -> None:
    document = _document()
    schemas = document["components"]["schemas"]
    left = [
        str(operation.get("requestBody"))
        for path in document["paths"].values()
        for operation in path.values()
    ]
    seen: set[str] = set()
    while left:
        for name in set(re.findall(r"#/components/schemas/(\w+)", left.pop())) - seen:
            seen.add(name)
            left.append(str(schemas[name]))
    assert {"ChatCompletionRequest", "GivenUserMessage", "FunctionTool"} <= seen
    for name in seen:
        for place, schema in _within(("components", name), schemas[name]):
            assert "default" not in schema, place


def test_schema_names_do_not_collide_with_generated_names() -> None:
    """Names differ from the names that generators make for operations and from clients' types."""
    document = _document()
    operations = [
        one["operationId"] for path in document["paths"].values() for one in path.values()
    ]
    taken = {f"{name}{suffix}".lower() for name in operations for suffix in _MADE}
    names = [name.lower() for name in document["components"]["schemas"]]
    assert len(names) == len(set(names))
    assert not (taken | _THEIRS).intersection(names)


def test_every_operation_says_who_may_call_it_and_what_it_answers() -> None:
    for methods in _document()["paths"].values():
        for operation in methods.values():
            assert operation["security"] in ([], [{"key": []}, {"headerKey": []}, {}]), operation[
                "operationId"
            ]
            for answer in operation["responses"].values():
                for media in answer.get("content", {}).values():
                    assert media["schema"], operation["operationId"]


def test_what_is_not_honoured_is_not_in_it() -> None:
    schemas = _document()["components"]["schemas"]
    for component, fields in {
        "ChatCompletionRequest": ("audio", "functions", "function_call", "modalities"),
        "CompletionRequest": ("suffix",),
        "ResponsesRequest": ("access_programs", "context_management"),
        "UserMessage": ("annotations", "function_call"),
        "StreamOptions": ("include_obfuscation",),
        "StructuredOutputs": ("disable_fallback", "structural_tag"),
        "MessagesRequest": ("container", "mcp_servers"),
    }.items():
        assert not schemas[component]["properties"].keys() & set(fields), component


def test_unions_whose_tag_tells_them_apart_say_so() -> None:
    schemas = _document()["components"]["schemas"]
    for name in (*_unions(schemas), "MessageEvent"):
        refs = [option["$ref"] for option in schemas[name].get("anyOf") or schemas[name]["oneOf"]]
        tagged = schemas[name]["discriminator"]
        assert sorted(tagged["mapping"].values()) == sorted(refs)
        for value, ref in tagged["mapping"].items():
            option = schemas[ref.rpartition("/")[-1]]
            assert option["properties"][tagged["propertyName"]]["const"] == value
            assert tagged["propertyName"] in option["required"]


def _unions(schemas: Json) -> list[str]:
    """Return the unions of objects that all must have a type of their own."""
    found = []
    for name, schema in schemas.items():
        options = [
            one.get("$ref", "").rpartition("/")[-1]
            for one in schema.get("anyOf") or schema.get("oneOf", ())
        ]
        if options and all(options):
            kinds = [
                schemas[one]["properties"].get("type", {}).get("const")
                if "type" in schemas[one].get("required", ())
                else None
                for one in options
            ]
            if all(kinds) and len(set(kinds)) == len(kinds):
                found.append(name)
    assert len(found) > 10
    return found


def test_two_schemas_cannot_have_one_title() -> None:
    components = Components({}, (), ())
    asked = Use(is_asked=True, is_answered=False)
    one = {"type": "object", "properties": {"a": {"type": "string"}}}
    assert components.portable(one, "Pair", asked) == {"$ref": "#/components/schemas/Pair"}
    components.portable(one, "Pair", asked)
    with pytest.raises(ValueError, match="Pair"):
        components.portable({"type": "object", "properties": {}}, "Pair", asked)
