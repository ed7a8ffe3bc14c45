"""Grammars of formats that do not write arguments as one JSON object."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.registry.tool_formats import call_grammar
from millrace.registry.tool_formats.written import calls_as_text
from millrace.schemas.errors import ParameterError
from millrace.schemas.tools import ToolCall, ToolChoice, ToolDefinition, ToolFormat, ToolMode
from tests.registry.test_tool_grammar import accepts, grammar
from tests.registry.tool_formats.reading import read

REQUIRED = ToolChoice(mode=ToolMode.REQUIRED)
AUTO = ToolChoice()
QWEN, GLM, PYTHONIC = ToolFormat.QWEN3_CODER, ToolFormat.GLM45, ToolFormat.PYTHONIC
STRICT = ToolDefinition(
    name="f", parameters={"properties": {"a": {"type": "integer"}}, "required": ["a"]}, strict=True
)
NEW = [one for one in ToolFormat if one not in (ToolFormat.HERMES, ToolFormat.LLAMA3)]


def called(tool_format: ToolFormat, *arguments: str) -> str:
    calls = [ToolCall(id="", name="f", arguments=one) for one in arguments]
    return calls_as_text(calls, tool_format)


@pytest.mark.parametrize("tool_format", NEW)
@pytest.mark.parametrize("parallel", [True, False])
def test_strict_tools_in_a_free_answer(tool_format: ToolFormat, parallel: bool) -> None:
    made = grammar(tool_format, AUTO, STRICT, parallel=parallel)
    assert accepts(made, "Hello <tool_cal [TOOL you")
    assert accepts(made, called(tool_format, '{"a": 1}'))
    assert not accepts(made, called(tool_format, '{"a": "x"}'))
    assert not accepts(made, called(tool_format, '{"b": 1}'))
    assert not accepts(made, called(tool_format, '{"a": 1, "b": 1}'))
    assert accepts(made, called(tool_format, '{"a": 1}', '{"a": 2}')) is parallel
    text = "I look.\n" + called(tool_format, '{"a": 1}')
    assert accepts(made, text)
    assert accepts(made, text.replace("1", "x")) is (tool_format is PYTHONIC)


@pytest.mark.parametrize("tool_format", [QWEN, GLM])
@pytest.mark.parametrize(
    ("schema", "text", "fits"),
    [
        ({"type": "string"}, 'any <b> "text"\\n', True),
        ({"type": "string"}, "null", True),
        ({"type": "string", "maxLength": 3}, "你好吗", True),
        ({"type": "string", "maxLength": 3}, "abcd", False),
        ({"type": "string", "minLength": 3}, "ab", False),
        ({"type": "string", "pattern": "^[a-z]+$"}, "abc", True),
        ({"type": "string", "pattern": "^[a-z]+$"}, "ab1", False),
        ({"type": "string", "pattern": "[0-9]/"}, "ab1/c", True),
        ({"type": "string", "pattern": "[0-9]/"}, "ab1c", False),
        ({"type": "string", "pattern": "^(ab|c)$"}, "c", True),
        ({"type": "string", "pattern": "^(ab|c)$"}, "d", False),
        # Not followed, and not strict.
        ({"type": "string", "pattern": "^a|b$"}, "x", True),
        ({"type": "string", "pattern": "(?!a)b"}, "x", True),
        ({"type": "string", "format": "haiku", "not": {"const": "y"}}, "x", True),
        ({"type": "string", "format": "date"}, "2024-02-29", True),
        ({"type": "string", "format": "date"}, "2024-13-01", False),
        ({"type": "string", "format": "date-time"}, "2024-02-29T23:59:59Z", True),
        ({"type": "string", "format": "uuid"}, "123e4567-e89b-12d3-a456-426614174000", True),
        ({"type": "string", "format": "email"}, "a.b@c.example", True),
        ({"type": "string", "format": "email"}, "a.b", False),
        ({"type": "string", "format": "ipv4"}, "192.168.0.256", False),
        ({"enum": ["°C", "F"]}, "°C", True),
        ({"enum": ["°C", "F"]}, "K", False),
        ({"const": "on"}, "on", True),
        ({"const": "on"}, "off", False),
        ({"allOf": [{"type": "string", "maxLength": 2}, {"minLength": 2}]}, "ab", True),
        ({"allOf": [{"type": "string", "maxLength": 2}, {"minLength": 2}]}, "a", False),
        ({"anyOf": [{"const": "auto"}, {"type": "string", "maxLength": 1}]}, "auto", True),
        ({"anyOf": [{"const": "auto"}, {"type": "string", "maxLength": 1}]}, "au", False),
        ({"$ref": "#/$defs/Short"}, "ab", True),
        ({"$ref": "#/$defs/Short"}, "abc", False),
        ({"type": ["string", "null"], "maxLength": 4}, "null", True),
        ({"type": ["string", "null"], "maxLength": 4}, "text", True),
        ({"type": ["string", "null"], "maxLength": 4}, "texts", False),
        # It may be read as JSON: then it fits without its quotes, or must have them.
        ({"type": ["string", "null"]}, '"x"', True),
        ({"type": ["string", "null"], "minLength": 3}, '"x"', False),
        ({"type": ["string", "null"], "minLength": 3}, "text", False),
        ({"type": ["string", "null"], "minLength": 3}, '"text"', True),
        ({"enum": ["a", None]}, "a", False),
        ({"enum": ["a", None]}, '"a"', True),
        ({"enum": ["a", None]}, "null", True),
        ({"type": ["string", "integer"]}, '"x"', True),
        ({"type": ["string", "integer"]}, "5", True),
        ({"type": ["string", "integer"]}, "x", False),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "yes", False),
        ({"type": "array", "items": {"type": "integer"}}, "[1, 2]", True),
        ({"type": "array", "items": {"type": "integer"}}, '["x"]', False),
        ({}, '{"a": [null]}', True),
    ],
)
def test_a_value_between_tags(
    tool_format: ToolFormat, schema: dict[str, Any], text: str, fits: bool
) -> None:
    parameters = {
        "$defs": {"Short": {"type": "string", "maxLength": 2}},
        "properties": {"a": schema},
        "required": ["a"],
    }
    made = grammar(tool_format, REQUIRED, ToolDefinition(name="f", parameters=parameters))
    if tool_format is QWEN:
        whole = f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n"
    else:
        whole = f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{text}</arg_value>\n"
    assert accepts(made, whole) is fits


def test_glm_s_line_breaks_may_be_missing() -> None:
    made = grammar(GLM, REQUIRED, STRICT)
    call = called(GLM, '{"a": 1}')
    assert accepts(made, call + call.replace("\n", "") + "\n" + call)
    assert not accepts(made, call.replace("\n", "\n\n"))


@pytest.mark.parametrize(
    ("arguments", "fits"),
    [
        ("a=1", True),
        ("a=1, b=True", True),
        ("a=1, b=true, c=None", True),
        ("a=1, c=[1, null]", True),
        ("b=False, a=1", False),
        ("b=False", False),
        ("", False),
        ("a=1,", False),
        ("a='x'", False),
    ],
)
def test_keyword_arguments(arguments: str, fits: bool) -> None:
    parameters = {
        "properties": {
            "a": {"type": "integer"},
            "b": {"type": "boolean"},
            "c": {"anyOf": [{"type": "array"}, {"type": "null"}]},
        },
        "required": ["a"],
    }
    made = grammar(PYTHONIC, REQUIRED, ToolDefinition(name="f", parameters=parameters))
    assert accepts(made, f"[f({arguments})]") is fits


def test_the_forms_that_arguments_may_have() -> None:
    parameters = {
        "properties": {"kind": {"type": "string"}},
        "required": ["kind"],
        "oneOf": [
            {"properties": {"kind": {"const": "a"}, "x": {"type": "integer"}}, "required": ["x"]},
            {"properties": {"kind": {"const": "b"}}, "required": ["y"]},
        ],
    }
    made = grammar(PYTHONIC, REQUIRED, ToolDefinition(name="f", parameters=parameters))
    assert accepts(made, '[f(kind="a", x=1)]')
    assert accepts(made, '[f(kind="b", y=["anything"])]')
    assert not accepts(made, '[f(kind="b", x=1)]')
    assert not accepts(made, '[f(kind="a")]')


@pytest.mark.parametrize(
    ("tool_format", "properties", "words"),
    [
        (QWEN, {"a<b": {}}, "names have no tags and line breaks"),
        (GLM, {" a": {}}, "names have no tags and line breaks"),
        (PYTHONIC, {"a b": {}}, "nothing but letters, digits, _ and -"),
        (PYTHONIC, {"a": False}, "'required' of parameters.properties.a of the strict tool f"),
        (QWEN, {"a": {"not": {"const": "y"}}}, "'not' of parameters.properties.a of the strict"),
        (QWEN, {"a": {"type": "string", "format": "haiku"}}, "'haiku' is not supported"),
        (QWEN, {"a": {"type": "string", "format": "uri"}}, "'uri' is not supported between tags"),
        (GLM, {"a": {"type": "string", "pattern": "^a|b$"}}, "'^a|b$' has a boundary within it"),
    ],
)
def test_what_a_format_cannot_hold(
    tool_format: ToolFormat, properties: dict[str, Any], words: str
) -> None:
    tool = ToolDefinition(
        name="f", parameters={"properties": properties, "required": list(properties)}, strict=True
    )
    with pytest.raises(ParameterError) as caught:
        call_grammar(tool_format, [tool], REQUIRED, True)
    assert words in caught.value.message
    assert caught.value.param == "tools"


LOOP = {"anyOf": [{"$ref": "#/$defs/Loop"}] * 60, "allOf": [{"$ref": "#/$defs/Loop"}] * 60}


@pytest.mark.parametrize("tool_format", [QWEN, GLM, PYTHONIC])
@pytest.mark.parametrize(
    "parameters",
    [
        {"$defs": {"Loop": LOOP}, "properties": {"a": {"$ref": "#/$defs/Loop"}}},
        {"$defs": {"Loop": {"type": "string"} | LOOP}, "properties": {"a": LOOP}},
        {
            "$defs": {"Loop": LOOP | {"allOf": [{"type": "string"}, *LOOP["allOf"]]}},
            "properties": {"a": {"$ref": "#/$defs/Loop"}},
        },
        {"properties": {"a": {"type": "string", "minLength": "x", "allOf": 5, "anyOf": {}}}},
        {"properties": [], "required": [["a"], 5], "anyOf": 7, "allOf": [3, None]},
        {"properties": {"a": True, "b": 5, "c": False}, "required": 5},
        {"properties": {"a": {"type": 5}, "b": {"enum": 5}, "c": {"anyOf": [{"type": []}]}}},
        {"properties": {"a": {"$ref": 5, "oneOf": 5, "pattern": 5, "minProperties": "x"}}},
    ],
)
def test_odd_schemas_end_in_a_grammar(tool_format: ToolFormat, parameters: dict[str, Any]) -> None:
    tool = ToolDefinition(name="f", parameters=parameters)
    assert call_grammar(tool_format, [tool], REQUIRED, True) is not None
    text = calls_as_text([ToolCall(id="", name="f", arguments='{"a": "1", "b": 2}')], tool_format)
    assert read(tool_format, text, [tool])[1][0][0] == "f"
