"""Closing of objects within a schema, unless something else declares their properties."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.registry.tool_formats.closed_schema import with_closed_parts
from millrace.registry.tool_formats.dropped import Dropped
from millrace.registry.tool_formats.grammar import rules_of_call
from millrace.schemas.tools import ToolDefinition, ToolFormat

_OPEN: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}}
_SHUT = _OPEN | {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"properties": {"x": _OPEN}}, {"properties": {"x": _SHUT}}),
        ({"items": _OPEN}, {"items": _SHUT}),
        ({"prefixItems": [_OPEN, True]}, {"prefixItems": [_SHUT, True]}),
        ({"additionalProperties": _OPEN}, {"additionalProperties": _SHUT}),
        ({"$defs": {"A": _OPEN}}, {"$defs": {"A": _SHUT}}),
        ({"definitions": {"A": {"items": _OPEN}}}, {"definitions": {"A": {"items": _SHUT}}}),
        (
            {"properties": {"x": _OPEN | {"properties": {"b": _OPEN}}}},
            {"properties": {"x": _SHUT | {"properties": {"b": _SHUT}}}},
        ),
        # Of one value, and of what is within it.
        ({"anyOf": [_OPEN, {"type": "null"}]}, {"anyOf": [_OPEN, {"type": "null"}]}),
        ({"oneOf": [{"items": _OPEN}]}, {"oneOf": [{"items": _SHUT}]}),
        # A property is no keyword, even if it has the name of one.
        (
            {"properties": {"not": _OPEN, "properties": _OPEN}},
            {"properties": {"not": _SHUT, "properties": _SHUT}},
        ),
        ({"items": _OPEN | {"default": {"if": 1}}}, {"items": _SHUT | {"default": {"if": 1}}}),
        # An array of values that look like schemas is none.
        ({"enum": [_OPEN], "default": _OPEN}, {"enum": [_OPEN], "default": _OPEN}),
    ],
)
def test_objects_within(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    assert with_closed_parts(schema) == expected


@pytest.mark.parametrize(
    "part",
    [
        {"type": "object"},
        {"type": "object", "properties": {}},
        _OPEN | {"additionalProperties": True},
        _OPEN | {"patternProperties": {"^b": True}},
        _OPEN | {"allOf": [{"required": ["b"]}]},
        _OPEN | {"anyOf": [{"required": ["b"]}]},
        _OPEN | {"$ref": "#/$defs/B"},
        _OPEN | {"if": {"required": ["a"]}},
        _OPEN | {"not": {"required": ["b"]}},
        _OPEN | {"unevaluatedProperties": False},
        True,
    ],
)
def test_what_stays_open(part: Any) -> None:
    schema = {"properties": {"x": part}, "$defs": {"B": {"type": "object"}}}
    assert with_closed_parts(schema) == schema


def test_definitions_that_are_put_together_stay_open() -> None:
    schema = {
        "allOf": [{"$ref": "#/$defs/A"}, {"properties": {"b": {}}}],
        "$defs": {"A": _OPEN},
    }
    assert with_closed_parts(schema) == schema


_LEAVES = st.sampled_from([{"type": "string"}, {"type": "integer"}, True])
_SCHEMAS = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(
            lambda properties: {"type": "object", "properties": properties}
        ),
        inner.map(lambda items: {"type": "array", "items": items}),
        st.lists(inner, min_size=1, max_size=2).map(lambda choices: {"anyOf": choices}),
    ),
    max_leaves=8,
).filter(lambda schema: isinstance(schema, dict))
_VALUES = st.recursive(
    st.sampled_from(["x", 3, None]),
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from("abcd"), inner, max_size=3), st.lists(inner, max_size=2)
    ),
    max_leaves=6,
)


@given(_SCHEMAS, _VALUES)
def test_what_fits_the_closed_one_fits_the_schema(schema: dict[str, Any], value: Any) -> None:
    closed = with_closed_parts(schema)
    assert with_closed_parts(closed) == closed
    if jsonschema.Draft202012Validator(closed).is_valid(value):
        jsonschema.validate(value, schema, jsonschema.Draft202012Validator)


def test_a_tool_closes_what_is_within_unless_it_is_strict() -> None:
    parameters = {"type": "object", "properties": {"x": _OPEN}}
    for strict, count in ((False, 2), (True, 1)):
        tool = ToolDefinition(name="f", parameters=parameters, strict=strict)
        rules = "\n".join(rules_of_call(ToolFormat.HERMES, tool, 0, Dropped()))
        assert rules.count('"additionalProperties": false') == count
