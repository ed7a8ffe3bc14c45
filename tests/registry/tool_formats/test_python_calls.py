"""Calls in Python's syntax, converted to JSON."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.registry.tool_formats import ArgumentsPiece, CallPiece, ToolCallParser
from millrace.registry.tool_formats.python_literals import as_json, as_literal
from millrace.schemas.tools import ToolFormat
from tests.registry.tool_formats.reading import read

PYTHONIC = ToolFormat.PYTHONIC


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Hello [you](there). ", "Hello [you](there). ", []),
        ("[1] A list, [2] of (a=1).", "[1] A list, [2] of (a=1).", []),
        ("[link](a=1)", "[link](a=1)", []),
        ("[sin(x), cos(x)]", "[sin(x), cos(x)]", []),
        ("[f()]", "", [("f", "{}")]),
        ("\n<|python_start|>[ f( ) ]\n", "", [("f", "{}")]),
        ('[f(a=1, b="x"), g()]', "", [("f", '{"a": 1, "b": "x"}'), ("g", "{}")]),
        ("[f(a=-1.5e3,b='it\\'s \"q\"',)]", "", [("f", '{"a": -1.5e3, "b": "it\'s \\"q\\""}')]),
        ("[f(a=True, b=None, c=false)]", "", [("f", '{"a": true, "b": null, "c": false}')]),
        (
            "[f(a=[1, {'k': (True,)}, 'x)'], b={})]",
            "",
            [("f", '{"a": [1, {"k": [true]}, "x)"], "b": {}}')],
        ),
        (
            '[f(a="\\x41\\u00e9\\U0001F600\\n\\/\\q")]',
            "",
            [("f", '{"a": "\\u0041\\u00e9😀\\n\\/\\\\q"}')],
        ),
        ('[f(a="line\nbreak")]', "", [("f", '{"a": "line\\nbreak"}')]),
        # What is no literal is a string.
        ("[f(city=New York, n=)]", "", [("f", '{"city": "New York", "n": ""}')]),
        ("[f(a=x.y(1, 2), b=1_000)]", "", [("f", '{"a": "x.y(1, 2)", "b": "1_000"}')]),
        # What follows is content.
        ("[f()] So.", "So.", [("f", "{}")]),
        ("[f(), then.", "then.", [("f", "{}")]),
        ('[f(a="x" + "y")]', "", [("f", '{"a": "x"}')]),
        ("[f(a=1, 2, b=3)]", "", [("f", '{"a": 1, "b": 3}')]),
        # Cut off.
        ("[f(a", "[f(a", []),
        ('[f(a="x', "", [("f", '{"a": "x')]),
        ("[f(a=[1, ", "", [("f", '{"a": ')]),
        ("[f(a=1), g(", "", [("f", '{"a": 1}')]),
        ("[f(a=1]. So", ". So", [("f", '{"a": 1}')]),
    ],
)
def test_pythonic(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert read(PYTHONIC, text) == (content, calls)


def test_strings_come_as_they_are_written() -> None:
    parser = ToolCallParser(PYTHONIC, lambda: "x")
    assert parser.push("[f(text") == []
    assert parser.push("=") == [CallPiece(0, "x", "f"), ArgumentsPiece(0, '{"text": ')]
    assert parser.push("'It") == [ArgumentsPiece(0, '"It')]
    assert parser.push("\\") == []
    assert parser.push("'s") == [ArgumentsPiece(0, "'s")]
    assert parser.push("', n=") == [ArgumentsPiece(0, '", "n": ')]
    assert parser.push("4") == []
    assert parser.push(")") == [ArgumentsPiece(0, "4}")]


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(values)
def test_literals_come_back(value: object) -> None:
    assert json.loads(as_json(as_literal(value))) == value
    assert json.loads(as_json(repr(value))) == value
    assert json.loads(as_json(json.dumps(value))) == value


@given(st.text())
def test_any_text_becomes_json(text: str) -> None:
    json.loads(as_json(text))


@pytest.mark.parametrize(
    ("literal", "told"),
    [("(1, 2)", [1, 2]), ("[1,]", [1]), ("nan", "nan"), ("[" * 5_000, "[" * 5_000), ("'a", "'a")],
)
def test_odd_literals(literal: str, told: object) -> None:
    assert json.loads(as_json(literal)) == told
