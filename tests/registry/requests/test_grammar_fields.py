"""Fields for grammars, and their refusals."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from millrace.registry.requests.decoding import decode
from millrace.registry.requests.parsing import parse_chat, parse_completion, parse_generate
from millrace.schemas.errors import InvalidJsonError, ParameterError
from millrace.schemas.openai import ChatCompletionRequest, CompletionRequest
from millrace.schemas.sampling import Grammar, GrammarKind
from millrace.schemas.websocket import Generate

_CHAT = msgspec.json.Decoder(ChatCompletionRequest)
_TEXT = msgspec.json.Decoder(CompletionRequest)
_SOCKET = msgspec.json.Decoder(Generate)
_SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"const": 1.50}}}


def chat(**fields: Any) -> Grammar | None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | fields
    return parse_chat(decode(_CHAT, msgspec.json.encode(body))).sampling.grammar


def schema_format(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": fields}


def test_a_format_of_json_is_a_grammar() -> None:
    assert chat(response_format={"type": "json_object"}) == Grammar(kind=GrammarKind.JSON_OBJECT)
    taken = chat(response_format=schema_format(name="x", schema=_SCHEMA, strict=True))
    assert taken is not None
    assert taken.kind is GrammarKind.JSON_SCHEMA
    assert msgspec.json.decode(taken.text) == _SCHEMA
    assert taken.text.index('"b"') < taken.text.index('"a"'), "properties keep their order"


@pytest.mark.parametrize(
    ("schema", "is_closed"),
    [
        (_SCHEMA, True),
        (_SCHEMA | {"additionalProperties": True}, False),
        (_SCHEMA | {"allOf": [{"required": ["c"]}]}, False),
        ({"type": "object"}, False),
        ({"type": "array", "items": {"type": "string"}}, False),
    ],
)
def test_a_schema_that_is_not_strict_closes_its_object(
    schema: dict[str, Any], is_closed: bool
) -> None:
    expected = schema | ({"additionalProperties": False} if is_closed else {})
    for given in (schema, "\n " + msgspec.json.encode(schema).decode()):
        taken = chat(response_format=schema_format(name="x", schema=given))
        assert taken is not None
        assert msgspec.json.decode(taken.text) == expected


@pytest.mark.parametrize("nothing", [{}, {"response_format": None}, {"guided_json": None}])
def test_no_grammar_is_asked_for(nothing: dict[str, Any]) -> None:
    assert chat(**nothing) is None
    assert chat(response_format={"type": "text"}) is None


def test_guided_fields_are_grammars() -> None:
    text = msgspec.json.encode(_SCHEMA).decode()
    schema = Grammar(kind=GrammarKind.JSON_SCHEMA, text=text)
    assert chat(guided_json=_SCHEMA) == schema
    assert chat(guided_json=text) == schema
    assert chat(guided_regex="a+") == Grammar(kind=GrammarKind.REGEX, text="a+")
    lark = 'start: "a" | "b"'
    assert chat(guided_grammar=lark) == Grammar(kind=GrammarKind.EBNF, text=lark)


_CLOSED = _SCHEMA | {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "array", "items": _SCHEMA}, {"type": "array", "items": _CLOSED}),
        (
            {"properties": {"in": _SCHEMA}, "additionalProperties": True},
            {"properties": {"in": _CLOSED}, "additionalProperties": True},
        ),
        (
            {"$ref": "#/$defs/A", "$defs": {"A": _SCHEMA, "B": {"type": "object"}}},
            {"$ref": "#/$defs/A", "$defs": {"A": _CLOSED, "B": {"type": "object"}}},
        ),
    ],
)
def test_a_schema_that_is_not_strict_closes_the_objects_within(
    schema: dict[str, Any], expected: dict[str, Any]
) -> None:
    for given in (schema, msgspec.json.encode(schema).decode()):
        taken = chat(response_format=schema_format(name="x", schema=given))
        assert taken is not None
        assert msgspec.json.decode(taken.text) == expected
    strict = chat(response_format=schema_format(name="x", schema=schema, strict=True))
    guided = chat(guided_json=schema)
    for taken in (strict, guided):
        assert taken is not None
        assert msgspec.json.decode(taken.text) == schema


_PATTERN = r"[ \n]{1,9}"
_SETTINGS = {"x-guidance": {"whitespace_pattern": _PATTERN}}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "json_object"}}, {"type": "object"}),
        ({"response_format": schema_format(name="x", schema=_SCHEMA, strict=True)}, _SCHEMA),
        ({"guided_json": _SCHEMA}, _SCHEMA),
        ({"guided_json": "{}"}, {}),
    ],
)
def test_json_may_have_other_blanks(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    taken = chat(**fields, guided_whitespace_pattern=_PATTERN)
    assert taken is not None
    assert taken.kind is GrammarKind.JSON_SCHEMA
    assert msgspec.json.decode(taken.text) == expected | _SETTINGS


@pytest.mark.parametrize(
    ("outputs", "kind", "text"),
    [
        ({"json": _SCHEMA}, GrammarKind.JSON_SCHEMA, msgspec.json.encode(_SCHEMA).decode()),
        ({"json_object": True, "regex": None}, GrammarKind.JSON_OBJECT, ""),
        ({"regex": "a+"}, GrammarKind.REGEX, "a+"),
        ({"choice": ["a.b", "c"]}, GrammarKind.REGEX, r"a\.b|c"),
        ({"grammar": 'start: "a"'}, GrammarKind.EBNF, 'start: "a"'),
    ],
)
def test_structured_outputs_are_grammars(
    outputs: dict[str, Any], kind: GrammarKind, text: str
) -> None:
    assert chat(structured_outputs=outputs) == Grammar(kind=kind, text=text)
    fields = {"model": "m", "prompt": "hi", "structured_outputs": outputs}
    taken = parse_completion(decode(_TEXT, msgspec.json.encode(fields)))
    assert taken.sampling.grammar == Grammar(kind=kind, text=text)


def test_structured_outputs_say_what_blanks_there_are() -> None:
    for given, settings in (
        ({"whitespace_pattern": _PATTERN}, _SETTINGS["x-guidance"]),
        (
            {"disable_any_whitespace": True},
            {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"},
        ),
    ):
        taken = chat(structured_outputs={"json": _SCHEMA} | given)
        assert taken is not None
        assert msgspec.json.decode(taken.text) == _SCHEMA | {"x-guidance": settings}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"guided_choice": ["a"] * 1025}, "guided_choice"),
        ({"guided_choice": ["a"], "guided_regex": "a"}, "guided_choice"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        (
            {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
        ),
        (
            {"structured_outputs": {"json": "{}", "whitespace_pattern": ""}},
            "structured_outputs.whitespace_pattern",
        ),
    ],
)
def test_structured_outputs_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ParameterError) as caught:
        chat(**fields)
    assert caught.value.param == param


def test_completions_take_a_format() -> None:
    fields = {"model": "m", "prompt": "hi", "response_format": {"type": "json_object"}}
    taken = parse_completion(decode(_TEXT, msgspec.json.encode(fields)))
    assert taken.sampling.grammar == Grammar(kind=GrammarKind.JSON_OBJECT)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "only with JSON"),
        ({"guided_regex": "a+"}, "only with JSON"),
        ({"guided_json": _SCHEMA | _SETTINGS}, "without x-guidance"),
        ({"guided_json": "[]"}, "an object"),
        ({"guided_json": _SCHEMA, "guided_whitespace_pattern": ""}, "1 to 256 characters"),
        ({"guided_json": _SCHEMA, "guided_whitespace_pattern": 257 * " "}, "1 to 256 characters"),
    ],
)
def test_other_blanks_are_refused_elsewhere(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ParameterError, match=said) as caught:
        chat(**{"guided_whitespace_pattern": _PATTERN} | fields)
    assert caught.value.param == "guided_whitespace_pattern"


def test_every_endpoint_takes_grammars() -> None:
    regex = Grammar(kind=GrammarKind.REGEX, text="é|漢+")
    fields = {"model": "m", "prompt": "hi", "guided_regex": regex.text}
    text = parse_completion(decode(_TEXT, msgspec.json.encode(fields)))
    fields |= {"type": "generate", "id": "1"}
    socket = parse_generate(decode(_SOCKET, msgspec.json.encode(fields)))
    assert text.sampling.grammar == socket.sampling.grammar == regex


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("response_format.type", {"response_format": {"type": "xml"}}),
        ("response_format", {"response_format": "json"}),
        ("response_format.json_schema", {"response_format": {"type": "json_schema"}}),
        ("response_format.json_schema.name", {"response_format": schema_format(schema=_SCHEMA)}),
        ("response_format.json_schema.schema", {"response_format": schema_format(name="x")}),
        (
            "response_format.json_schema.schema",
            {"response_format": schema_format(name="x", schema=[])},
        ),
        ("guided_json", {"guided_json": 3}),
        ("guided_json", {"guided_json": ""}),
        ("guided_regex", {"guided_regex": ""}),
        ("guided_regex", {"guided_regex": "a" * 70_000}),
        ("guided_grammar", {"guided_grammar": ["a"]}),
        ("guided_regex", {"guided_regex": "a", "guided_json": {}}),
        ("guided_regex", {"guided_regex": "a", "response_format": {"type": "json_object"}}),
    ],
)
def test_what_is_no_grammar_is_refused_by_name(param: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ParameterError) as caught:
        chat(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize("schema", [b'{"a":"\xff"}', b'{"a":' * 3_000 + b"1" + b"}" * 3_000])
def test_a_schema_that_is_no_json_is_refused(schema: bytes) -> None:
    body = b'{"model":"m","messages":[{"role":"user","content":"x"}],"guided_json":%b}' % schema
    with pytest.raises((ParameterError, InvalidJsonError)):
        parse_chat(decode(_CHAT, body))


@pytest.mark.parametrize(
    ("field", "ours", "value"),
    [
        ("regex", "guided_regex", "a+"),
        ("ebnf", "guided_grammar", 'root ::= "a"'),
        ("json_schema", "guided_json", _SCHEMA),
        ("json_schema", "guided_json", msgspec.json.encode(_SCHEMA).decode()),
    ],
)
def test_the_names_of_sglang(field: str, ours: str, value: Any) -> None:
    assert chat(**{field: value}) == chat(**{ours: value}) is not None
    assert chat(**{field: None}) is None
    with pytest.raises(ParameterError, match="Only one grammar is allowed") as caught:
        chat(**{field: value, ours: value})
    assert caught.value.param == field
    for wrong in (7, ["a"]):
        with pytest.raises(ParameterError) as caught:
            chat(**{field: wrong})
        assert caught.value.param == field


def test_the_backend_of_grammars_is_a_hint() -> None:
    for backend in ("xgrammar", "lm-format-enforcer:no-fallback", None):
        assert chat(guided_regex="a", guided_decoding_backend=backend) == chat(guided_regex="a")
        assert chat(guided_decoding_backend=backend) is None
