"""Check of calls without a grammar against the schemas of strict tools."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from millrace.registry.tool_formats.strictness import violations
from millrace.schemas.tools import ToolCall, ToolDefinition

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "array", "items": {"$ref": "#/$defs/day"}},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"day": {"type": "integer", "minimum": 1}},
}


def faults(
    arguments: str, schema: dict[str, Any] | None = None, *, strict: bool = True
) -> list[str]:
    tool = ToolDefinition(name="w", parameters=schema or CITY, strict=strict)
    call = ToolCall(id="", name="w", arguments=arguments)
    return [one.detail for one in violations([call], [tool])]


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ('{"city": "Oslo", "unit": "C", "days": [1, 2]}', None),
        ("{}", "w: $: 'city' is a required property"),
        ("", "w: $: 'city' is a required property"),
        ('{"city": 1}', "w: $.city: 1 is not of type 'string'"),
        ('{"city": "O", "unit": "K"}', "w: $.unit: 'K' is not one of ['C', 'F']"),
        ('{"city": "O", "days": [1, 0]}', "w: $.days[1]: 0 is less than the minimum of 1"),
        ('{"city": "O", "at": 1}', "w: $: Additional properties are not allowed"),
        ('{"city": "O"', "w: the arguments are not JSON"),
        ('["O"]', "w: the arguments are not a JSON object"),
        ("[" * 100_000, "w: the arguments are not JSON"),
    ],
)
def test_the_first_fault_is_told(arguments: str, fault: str | None) -> None:
    found = faults(arguments)
    assert [one[: len(fault or "")] for one in found] == ([] if fault is None else [fault])
    assert faults(arguments, strict=False) == []


def test_calls_of_other_tools_are_not_checked() -> None:
    tool = ToolDefinition(name="w", parameters=CITY, strict=True)
    assert not list(violations([ToolCall(id="", name="v", arguments="{}")], [tool]))


def _doubling(depth: int) -> dict[str, Any]:
    defs: dict[str, Any] = {
        f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(depth)
    }
    return {"$ref": "#/$defs/a0", "$defs": defs | {f"a{depth}": {"type": "string"}}}


def _all_of(schema: dict[str, Any], number: int = 1_400) -> dict[str, Any]:
    return {"allOf": [schema] * number}


@pytest.mark.parametrize(
    ("schema", "arguments"),
    [
        (_doubling(40), {}),
        ({"$ref": "#"}, {}),
        ({"type": "no such type"}, {}),
        ({"required": 3}, {"a": 1}),
        ({"$ref": "https://example.com/schema"}, {}),
        ({"$ref": "#/$defs/none"}, {}),
        ({"patternProperties": {"(a+)+$": {}}, "additionalProperties": False}, {"a" * 40 + "!": 1}),
        ({"properties": {"a": {"pattern": "(a+)+$"}}}, {"a": "a" * 40 + "!"}),
        ({"properties": {"a": {"uniqueItems": True}}}, {"a": list(range(20_000))}),
        ({"properties": {"a": {"items": {"enum": list(range(2_000))}}}}, {"a": [-1] * 2_000}),
        ({"properties": {"a": _all_of({"items": {}})}}, {"a": [1] * 4_000}),
        (_all_of({"propertyNames": {}}), dict.fromkeys(map(str, range(4_000)))),
        (_all_of({"dependentRequired": {"a": ["a"] * 20_000}}), {"a": 1}),
        (
            _all_of({"$ref": "#x"})
            | {
                "$defs": {str(i): {"type": "string"} for i in range(2_000)}
                | {"x": {"$anchor": "x"}}
            },
            {},
        ),
    ],
)
def test_a_schema_that_cannot_be_checked_in_time_is_not(
    schema: dict[str, Any], arguments: dict[str, Any]
) -> None:
    started_s = time.process_time()
    found = faults(json.dumps(arguments), schema)
    assert time.process_time() - started_s < 2.0
    assert found == [] or "is not one of" in found[0]


def test_the_calls_of_one_answer_share_the_steps() -> None:
    tool = ToolDefinition(name="w", parameters=_all_of({"type": "object"}), strict=True)
    calls = [ToolCall(id="", name="w", arguments="{}")] * 500
    started_s = time.process_time()
    assert not list(violations(calls, [tool]))
    assert time.process_time() - started_s < 2.0


def test_a_long_schema_is_not_checked() -> None:
    for num_characters, is_checked in ((200_000, True), (300_000, False)):
        schema = {"properties": {"a": {"enum": ["x" * num_characters]}}}
        assert bool(faults('{"a": 1}', schema)) == is_checked
