"""Forced calls: every text that the grammar admits parses as calls with fitting arguments."""

from __future__ import annotations

import itertools
import json
import random
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest

from millrace.engine.grammar.library import GrammarLibrary
from millrace.engine.grammar.probe import GrammarProbe
from millrace.registry.catalogue import load_catalogue
from millrace.registry.served import ServedModel
from millrace.registry.tool_formats import (
    ArgumentsPiece,
    CallPiece,
    ContentPiece,
    ToolCallParser,
    call_grammar,
)
from millrace.registry.tool_formats.grammar import MAX_PARALLEL_CALLS
from millrace.registry.tool_formats.written import calls_as_text
from millrace.schemas.errors import GrammarError, ParameterError
from millrace.schemas.frames import FinishReason
from millrace.schemas.jobs import ChatMessage
from millrace.schemas.sampling import Grammar, GrammarKind
from millrace.schemas.tools import ToolCall, ToolChoice, ToolDefinition, ToolFormat, ToolMode
from tests.engine.grammar.grammars import ask, load_engine, run

WEATHER = ToolDefinition(
    name="get-weather_2",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 8},
            "unit": {"enum": ["°C", '"F"']},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
        },
        "required": ["city", "unit"],
    },
)
NOW = ToolDefinition(name="now")
# As generators of schemas write them: references, unions, and an unknown format.
BOOK = ToolDefinition(
    name="book",
    parameters={
        "$defs": {
            "Seat": {
                "type": "object",
                "properties": {"row": {"type": "integer"}, "letter": {"type": "string"}},
                "required": ["row"],
                "additionalProperties": False,
            }
        },
        "properties": {
            "seat": {"$ref": "#/$defs/Seat"},
            "when": {"oneOf": [{"type": "null"}, {"type": "boolean"}]},
            "how": {
                "anyOf": [{"type": "string", "format": "haiku", "maxLength": 5}, {"type": "null"}]
            },
        },
        "required": ["seat", "when"],
    },
)
TOOLS = {tool.name: tool for tool in (WEATHER, NOW, BOOK)}
REQUIRED = ToolChoice(mode=ToolMode.REQUIRED)
AUTO = ToolChoice()
formats = pytest.mark.parametrize("tool_format", list(ToolFormat))
Calls = list[tuple[str, str]]


@cache
def demo() -> ServedModel:
    return ServedModel.load(load_catalogue(""), "demo")


@cache
def library() -> GrammarLibrary:
    return GrammarLibrary(demo().tokenizer, demo().tokenizer.vocab_size)


def test_words_of_a_schema_take_no_room_in_a_grammar() -> None:
    """Agents send dozens of tools, whose schemas are mostly prose."""
    described = {
        "type": "string",
        "description": "y" * 300,
        "title": "T",
        "examples": ["description"],
    }
    named = dict.fromkeys(("title", "description", "default", *"abcdefg"), described)
    parameters = {
        "properties": named
        | {"kind": {"enum": [{"title": "kept"}]}, "of": {"$ref": "#/$defs/description"}},
        "required": ["title", "description", "default"],
        "$defs": {"description": {"type": "null", "description": "y"}},
        "default": {"title": "x"},
    }
    tools = [ToolDefinition(name=f"tool_{i}", parameters=parameters) for i in range(24)]
    for tool_format in (ToolFormat.HERMES, ToolFormat.QWEN3_CODER):
        made = grammar(tool_format, REQUIRED, *tools)
        assert "yy" not in made.text
        for name in named:
            assert name in made.text
    one = grammar(ToolFormat.HERMES, REQUIRED, tools[0]).text
    assert '"enum": [{"title": "kept"}]' in one
    assert '"required": ["title", "description", "default"]' in one
    assert '"$defs": {"description": {"type": "null"}}' in one
    assert library().compile(grammar(ToolFormat.HERMES, REQUIRED, tools[0]))


def grammar(
    tool_format: ToolFormat, choice: ToolChoice, *tools: ToolDefinition, parallel: bool = True
) -> Grammar:
    made = call_grammar(tool_format, tools, choice, parallel)
    assert made is not None
    return made


def drawn(made: Grammar, seed: int, max_tokens: int = 9_000) -> str:
    """Return a text by a model that draws any allowed token."""
    tokenizer = demo().tokenizer
    matcher = library().compile(made)
    source = random.Random(seed)
    mask = np.zeros(library().num_words, dtype="<u4")
    tokens: list[int] = []
    while not matcher.complete and len(tokens) < max_tokens:
        matcher.fill_mask(mask.ctypes.data, library().num_words)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        tokens.append(source.choice(np.flatnonzero(bits).tolist()))
        matcher.accept((tokens[-1],))
    assert matcher.complete
    return tokenizer.decode(tokens)


def accepts(made: Grammar, text: str) -> bool:
    """Return whether a completion may begin with ``text``."""
    matcher = library().compile(made)
    try:
        matcher.accept(demo().tokenizer.encode(text, add_special_tokens=False))
    except GrammarError:
        return False
    return True


def read(tool_format: ToolFormat, text: str) -> tuple[str, Calls]:
    numbers = itertools.count()
    parser = ToolCallParser(tool_format, lambda: str(next(numbers)), list(TOOLS.values()))
    content, calls = "", []
    for piece in [*parser.push(text), *parser.finish()]:
        match piece:
            case ContentPiece(more):
                content += more
            case CallPiece(_, _, name):
                calls.append((name, ""))
            case ArgumentsPiece(_, more):
                calls[-1] = calls[-1][0], calls[-1][1] + more
    return content, calls


def check_arguments(calls: Calls) -> None:
    for name, arguments in calls:
        value = json.loads(arguments)
        schema = TOOLS[name].parameters
        if schema is None:
            assert value == {}
        else:
            jsonschema.validate(value, schema | {"additionalProperties": False})


@formats
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("choice", [REQUIRED, ToolChoice(mode=ToolMode.NAMED, name="book")])
def test_what_is_forced_reads_as_calls(
    tool_format: ToolFormat, choice: ToolChoice, parallel: bool
) -> None:
    made = grammar(tool_format, choice, *TOOLS.values(), parallel=parallel)
    lengths = set()
    for seed in range(4):
        content, calls = read(tool_format, drawn(made, seed))
        assert content == ""
        check_arguments(calls)
        assert not choice.name or {name for name, _ in calls} == {choice.name}
        lengths.add(len(calls))
    assert lengths == {1} if not parallel else max(lengths) > 1
    assert max(lengths) <= MAX_PARALLEL_CALLS


@formats
def test_the_engine_s_probe_takes_them(tool_format: ToolFormat) -> None:
    probe = GrammarProbe()
    try:
        for choice in (REQUIRED, AUTO):
            probe.check(grammar(tool_format, choice, *TOOLS.values(), parallel=False))
    finally:
        probe.close()


@formats
def test_a_free_answer_is_free(tool_format: ToolFormat) -> None:
    assert call_grammar(tool_format, [WEATHER], AUTO, True) is None
    assert call_grammar(tool_format, [], AUTO, False) is None
    assert call_grammar(tool_format, [WEATHER], ToolChoice(mode=ToolMode.NONE), False) is None


STRICT = ToolDefinition(
    name="f", parameters={"properties": {"a": {"type": "integer"}}}, strict=True
)


@pytest.mark.parametrize(
    ("text", "parallel", "fits"),
    [
        ("Hello <tool_cal you {there", True, True),
        ('Hm.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', True, True),
        ('<tool_call>\n{"name": "f", "arguments": {"a": "x', True, False),
        ('<tool_call>\n{"name": "f", "arguments": {"b', True, False),
        ('<tool_call>\n{"name": "g', True, False),
        ('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\nSo', True, True),
        ('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n<tool_call>x', True, False),
        ('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', False, True),
        ('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n', False, False),
    ],
)
def test_strict_tools_in_a_free_answer_hermes(text: str, parallel: bool, fits: bool) -> None:
    made = grammar(ToolFormat.HERMES, AUTO, STRICT, NOW, parallel=parallel)
    assert accepts(made, text) is fits


@pytest.mark.parametrize(
    ("text", "parallel", "fits"),
    [
        ("Hello {you}", True, True),
        (" \n Hello", True, True),
        ('{"name": "f", "parameters": {"a": 1}}; {"name": "now", "parameters": {}}', True, True),
        ('{"name": "now", "parameters": {}}; ', False, False),
        ('{"name": "f", "parameters": {"a": "', True, False),
        ('{"city"', True, False),
    ],
)
def test_strict_tools_in_a_free_answer_llama3(text: str, parallel: bool, fits: bool) -> None:
    made = grammar(ToolFormat.LLAMA3, AUTO, STRICT, NOW, parallel=parallel)
    assert accepts(made, text) is fits


ANSWER = {
    "$defs": {"N": {"type": "integer"}},
    "type": "object",
    "properties": {"name": {"$ref": "#/$defs/N"}, "nap": {"const": 1}},
    "required": ["name"],
    "additionalProperties": False,
}
JSON_ANSWER = Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(ANSWER))


@formats
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("answer", [JSON_ANSWER, Grammar(kind=GrammarKind.JSON_OBJECT)])
def test_calls_or_an_answer_in_json(
    tool_format: ToolFormat, parallel: bool, answer: Grammar
) -> None:
    made = call_grammar(tool_format, [NOW, BOOK], AUTO, parallel, answer)
    assert made is not None
    assert accepts(made, '{"name": 7')
    assert accepts(made, '{"nap": 1}') is (answer is not JSON_ANSWER)
    assert accepts(made, "{}") is (answer is not JSON_ANSWER)
    assert not accepts(made, "Hello")
    call = ToolCall(id="a", name="now", arguments="{}")
    assert accepts(made, calls_as_text([call], tool_format))
    assert accepts(made, calls_as_text([call, call], tool_format)) is parallel


@pytest.mark.parametrize(
    ("settings", "fits", "fits_not"),
    [
        ({}, '{"name": 7, "nap": 1}', '{"name":7}'),
        ({"whitespace_pattern": r"\n"}, '{"name":\n7,\n"nap":\n1}', '{"name": 7}'),
        (
            {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"},
            '{"name":7,"nap":1}',
            '{"name": 7}',
        ),
    ],
    ids=["as tools", "by a pattern", "none"],
)
def test_blanks_in_an_answer_beside_tools(
    settings: dict[str, Any], fits: str, fits_not: str
) -> None:
    text = json.dumps(ANSWER | ({"x-guidance": settings} if settings else {}))
    answer = Grammar(kind=GrammarKind.JSON_SCHEMA, text=text)
    made = call_grammar(ToolFormat.HERMES, [NOW, BOOK], AUTO, True, answer)
    assert made is not None
    assert accepts(made, fits)
    assert not accepts(made, fits_not)


@formats
def test_what_is_drawn_is_calls_or_the_answer(tool_format: ToolFormat) -> None:
    made = call_grammar(tool_format, [NOW, BOOK], AUTO, True, JSON_ANSWER)
    assert made is not None
    for seed in range(5):
        content, calls = read(tool_format, drawn(made, seed))
        if calls:
            check_arguments(calls)
            assert content == ""
        else:
            jsonschema.validate(json.loads(content), ANSWER)


def test_an_answer_s_own_form_where_no_tool_is_called() -> None:
    none = ToolChoice(mode=ToolMode.NONE)
    assert call_grammar(ToolFormat.HERMES, [NOW], none, True, JSON_ANSWER) is JSON_ANSWER
    assert call_grammar(ToolFormat.HERMES, [], AUTO, True, JSON_ANSWER) is JSON_ANSWER
    forced = call_grammar(ToolFormat.HERMES, [NOW], REQUIRED, True, JSON_ANSWER)
    assert forced == call_grammar(ToolFormat.HERMES, [NOW], REQUIRED, True)


@pytest.mark.parametrize(
    ("answer", "param", "words"),
    [
        (Grammar(kind=GrammarKind.REGEX, text="a+"), "tools", "regex grammar is not allowed with"),
        (Grammar(kind=GrammarKind.EBNF, text='start: "a"'), "tools", "ebnf grammar is not"),
        (Grammar(kind=GrammarKind.JSON_SCHEMA, text="{"), "response_format", "is not JSON"),
        (
            Grammar(kind=GrammarKind.JSON_SCHEMA, text='{"x-guidance": 5}'),
            "response_format",
            "x-guidance of the schema must be an object",
        ),
    ],
)
def test_answers_that_do_not_go_with_calls(answer: Grammar, param: str, words: str) -> None:
    with pytest.raises(ParameterError, match=words) as caught:
        call_grammar(ToolFormat.HERMES, [NOW], AUTO, True, answer)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("parameters", "arguments", "fits"),
    [
        ({"properties": {}}, '{"a"', False),
        ({"properties": {}, "additionalProperties": True}, '{"a"', True),
        ({"anyOf": [{"properties": {"a": {"type": "null"}}}]}, '{"a": null, "b"', True),
        ({"type": ["object", "null"]}, "null", False),
        ({}, "{}", True),
    ],
)
def test_properties_beyond_the_schema(
    parameters: dict[str, object], arguments: str, fits: bool
) -> None:
    made = grammar(ToolFormat.LLAMA3, REQUIRED, ToolDefinition(name="f", parameters=parameters))
    assert accepts(made, f'{{"name": "f", "parameters": {arguments}') is fits


@pytest.mark.parametrize(
    ("tools", "choice", "param", "words"),
    [
        ([], REQUIRED, "tool_choice", "needs tools to choose from"),
        ([NOW], ToolChoice(mode=ToolMode.NAMED, name="f"), "tool_choice", "not one of the tools"),
        (
            [ToolDefinition(name="f", parameters={"type": "string"})],
            REQUIRED,
            "tools",
            "f must be a schema of type object",
        ),
        (
            [ToolDefinition(name="f", parameters={"const": "x" * 70_000})],
            REQUIRED,
            "tools",
            "too large to have calls follow them",
        ),
    ],
)
def test_what_cannot_be_forced(
    tools: list[ToolDefinition], choice: ToolChoice, param: str, words: str
) -> None:
    with pytest.raises(ParameterError, match=words) as caught:
        call_grammar(ToolFormat.HERMES, tools, choice, True)
    assert caught.value.param == param


def test_the_demo_model_calls_a_tool() -> None:
    tokenizer = demo().tokenizer
    prompt = tokenizer.encode_chat([ChatMessage("user", "How is the weather?")], [WEATHER, NOW])
    made = grammar(ToolFormat.HERMES, REQUIRED, WEATHER, NOW, parallel=False)
    engine = load_engine(demo().path)
    asked = ask("a", made, prompt=prompt, temperature=0.0, eos_token_ids=tokenizer.eos_token_ids)
    answers = run(engine, tokenizer, asked)
    content, calls = read(ToolFormat.HERMES, answers.text("a"))
    assert answers.reason("a") is FinishReason.STOP
    assert (content, len(calls)) == ("", 1)
    check_arguments(calls)
