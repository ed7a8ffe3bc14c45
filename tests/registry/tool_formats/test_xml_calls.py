"""Calls with a tag for each argument, whose types come from the schemas."""

from __future__ import annotations

import json
from typing import Any

import pytest

from millrace.registry.tool_formats import ArgumentsPiece, CallPiece, ToolCallParser
from millrace.registry.tool_formats.argument_types import ArgumentTypes
from millrace.schemas.tools import ToolDefinition, ToolFormat
from tests.registry.tool_formats.reading import read

QWEN, GLM = ToolFormat.QWEN3_CODER, ToolFormat.GLM45
TOOLS = [
    ToolDefinition(
        name="f",
        parameters={
            "properties": {
                "text": {"type": "string"},
                "number": {"type": "integer"},
                "maybe": {"type": ["string", "null"]},
            }
        },
    ),
    ToolDefinition(name="g-1"),
]


def qwen(name: str, **arguments: str) -> str:
    inner = "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def glm(name: str, **arguments: str) -> str:
    inner = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>{name}\n{inner}</tool_call>"


@pytest.mark.parametrize(("tool_format", "written"), [(QWEN, qwen), (GLM, glm)])
def test_both(tool_format: ToolFormat, written: Any) -> None:
    def told(text: str) -> tuple[str, list[tuple[str, Any]]]:
        content, calls = read(tool_format, text, TOOLS)
        return content, [(name, json.loads(arguments)) for name, arguments in calls]

    assert told("Is <b> a tag? ") == ("Is <b> a tag? ", [])
    assert told(f"I look.\n{written('g-1')}\n") == ("I look.", [("g-1", {})])
    odd = 'It\'s "5" <b> \\ \n\n</para </arg_ 你'
    assert told(written("f", text=odd, number="-5")) == ("", [("f", {"text": odd, "number": -5})])
    assert told(written("f", text="5") + "\n" + written("g-1", a="5") + "Done.") == (
        "Done.",
        [("f", {"text": "5"}), ("g-1", {"a": 5})],
    )
    assert told(written("f", text="", maybe="null")) == ("", [("f", {"text": "", "maybe": None})])
    # Cut off in auto: nothing but whole arguments is told, and no tag.
    whole = written("f", number="12", text="x")
    for end in range(len("<tool_call>"), len(whole)):
        content, calls = read(tool_format, whole[:end], TOOLS)
        assert content == ""
        assert len(calls) <= 1
        assert not any("</" in arguments for _, arguments in calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("<tool_call><function=f></function></tool_call>", "", [("f", "{}")]),
        # More than one in a pair of tags, or a tag too few.
        (
            "<tool_call>\n<function=f>\n</function>\n<function=g-1>\n</function></tool_call>",
            "",
            [("f", "{}"), ("g-1", "{}")],
        ),
        ("<tool_call>\n<function=f>\n</tool_call> So", "So", [("f", "{}")]),
        ("<tool_call>\n<function=f>\nno <b>", "no <b>", [("f", "{}")]),
        # Without the tag before it.
        (
            "I look.\n<function=f>\n<parameter=number>\n1\n</parameter></function>\n</tool_call>!",
            "I look.!",
            [("f", '{"number": 1}')],
        ),
        ("<function=f>\n</function>\nSo <func", "So <func", [("f", "{}")]),
        ("<function=a b>", "<function=a b>", []),
        ("<tool_call>\n{}", "<tool_call>\n{}", []),
        ("<tool_call>\n<function=a b>", "<tool_call>\n<function=a b>", []),
    ],
)
def test_qwen_s_oddities(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert read(QWEN, text, TOOLS) == (content, calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("<tool_call>f</tool_call>", "", [("f", "{}")]),
        (
            "<tool_call>f<arg_key>number</arg_key><arg_value>1</arg_value></tool_call>",
            "",
            [("f", '{"number": 1}')],
        ),
        ("<tool_call>Hello there</tool_call>", "<tool_call>Hello there</tool_call>", []),
        ("<tool_call>f(a=1)", "<tool_call>f(a=1)", []),
    ],
)
def test_glm_s_oddities(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert read(GLM, text, TOOLS) == (content, calls)


def test_texts_come_as_they_are_written() -> None:
    parser = ToolCallParser(QWEN, lambda: "x", TOOLS)
    begun = [CallPiece(0, "x", "f"), ArgumentsPiece(0, "{")]
    assert parser.push("<tool_call>\n<function=f>") == begun
    assert parser.push("\n<parameter=text>\nIt") == [ArgumentsPiece(0, '"text": "It')]
    assert parser.push("\n") == []
    assert parser.push("is\n</para") == [ArgumentsPiece(0, "\\nis")]
    assert parser.push("meter>") == [ArgumentsPiece(0, '"')]
    assert parser.push("\n<parameter=number>4") == [ArgumentsPiece(0, ', "number": ')]
    assert parser.push("2</parameter>") == [ArgumentsPiece(0, "42")]
    assert parser.push("</function>") == [ArgumentsPiece(0, "}")]


ROOT = {
    "$defs": {"Name": {"type": "string"}, "Loop": {"$ref": "#/$defs/Loop"}},
    "properties": {
        "ref": {"$ref": "#/$defs/Name"},
        "loop": {"$ref": "#/$defs/Loop"},
        "nowhere": {"$ref": "#/$defs/None"},
        "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "number": {"type": "number"},
        "whole": {"type": "integer"},
        "flag": {"type": "boolean"},
        "list": {"type": "array"},
        "choice": {"enum": ["a", 1]},
        "const": {"const": "1"},
        "all": {"allOf": [{"type": "string"}, {"maxLength": 4}]},
        "any": {},
    },
    "anyOf": [{"properties": {"form": {"type": "string"}}}, {"properties": {"form": {"const": 1}}}],
}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("ref", "5", "5"),
        ("loop", "5", 5),
        ("nowhere", "5", 5),
        ("either", "5", 5),
        ("either", "x", "x"),
        ("either", '"5"', "5"),
        ("either", "'5'", "'5'"),
        ("either", "true", "true"),
        ("number", "5", 5),
        ("number", " 1e3\n", 1000.0),
        ("whole", "5.0", 5.0),
        ("whole", "five", "five"),
        ("whole", "5.5", 5.5),
        ("flag", "True", True),
        ("list", "(1, None)", [1, None]),
        ("choice", "1", 1),
        ("choice", "a", "a"),
        ("const", "1", "1"),
        ("all", "null", "null"),
        ("any", "null", None),
        ("any", "x y", "x y"),
        ("form", "1", 1),
        ("form", "x", "x"),
        ("else", "[1]", [1]),
    ],
)
def test_what_an_argument_is(name: str, text: str, value: object) -> None:
    types = ArgumentTypes([ToolDefinition(name="t", parameters=ROOT)])
    assert json.loads(types.as_json("t", name, text)) == value
