"""Schemas and their grammars: an admitted text fits the schema, and unsupported keywords are
refused."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from millrace.engine.grammar.library import GrammarLibrary
from millrace.registry.tokenizers.tokenizer import Tokenizer
from millrace.schemas.errors import GrammarError
from tests.engine.grammar.grammars import schema
from tests.support.engine.tokenizers_made import byte_level, write_tokenizer

_NUM_SEEDS = 25
_MAX_TOKENS = 400
_INTEGER: dict[str, Any] = {"type": "integer"}
_LETTERS = {"patternProperties": {"^[ab]$": _INTEGER}, "additionalProperties": False}
_THREE = {"properties": dict.fromkeys("abc", _INTEGER)}
_CLOSED = _THREE | {"additionalProperties": False}
_NODE = {
    "type": "object",
    "properties": {"name": {"enum": ["x"]}, "next": {"$ref": "#/$defs/Node"}},
    "additionalProperties": False,
}
_LOOP = {"type": "object", "properties": {"a": {"$ref": "#/$defs/Loop"}}, "required": ["a"]}
_LISTS = {"type": "array", "items": {"$ref": "#/$defs/Lists"}, "minItems": 1}

KEPT: dict[str, dict[str, Any]] = {
    "one of some listed": _CLOSED | {"minProperties": 1},
    "two of three listed": _CLOSED | {"minProperties": 2, "maxProperties": 2},
    "at most one listed": _CLOSED | {"maxProperties": 1},
    "at most two, one required": _CLOSED | {"required": ["b"], "maxProperties": 2},
    "no more than all": _CLOSED | {"maxProperties": 9},
    "required ones are enough": _THREE | {"required": ["a", "b"], "minProperties": 2},
    "one of any name": {"additionalProperties": _INTEGER, "minProperties": 1},
    "none": {"additionalProperties": _INTEGER, "maxProperties": 0},
    "one by a pattern": _LETTERS | {"maxProperties": 1},
    "counted within": {"properties": {"o": _CLOSED | {"minProperties": 2}}, "required": ["o"]},
    "counted, or a whole number": _CLOSED | {"type": ["object", "integer"], "minProperties": 2},
    "counted by reference": {
        "$defs": {"Three": {"type": "object", **_CLOSED, "minProperties": 2}},
        "properties": {"o": {"$ref": "#/$defs/Three"}},
        "required": ["o"],
    },
    "of a map without a count": {"additionalProperties": _INTEGER},
    "names that are texts": {"propertyNames": {"type": "string"}, "maxProperties": 1},
    "constants": {"type": "string", "oneOf": [{"const": "a"}, {"const": "b"}, {"enum": ["c"]}]},
    "constants without a type": {"oneOf": [{"const": 1}, {"const": True}, {"const": None}]},
    "ranges": {
        "oneOf": [
            {"type": "integer", "maximum": 3},
            {"type": "integer", "minimum": 4, "maximum": 9},
            {"type": "integer", "exclusiveMinimum": 9},
        ]
    },
    "ranges that touch": {
        "oneOf": [
            {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
            {"type": "number", "minimum": 1, "maximum": 2},
        ]
    },
    "a constant beyond a range": {"oneOf": [{"const": -1}, {"type": "integer", "minimum": 0}]},
    "a constant that an object does not admit": {
        "oneOf": [{"const": {"a": "x"}}, {"type": "object", **_CLOSED, "required": ["a"]}]
    },
    "lengths": {
        "oneOf": [
            {"type": "string", "maxLength": 2},
            {"type": "string", "minLength": 3, "maxLength": 4},
        ]
    },
    "tagged objects": {
        "oneOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": kind}, "x": _INTEGER},
                "required": ["kind"],
                "additionalProperties": False,
            }
            for kind in ("a", "b")
        ]
    },
    "references that exclude each other": {
        "$defs": {"A": {"type": "null"}, "B": {"type": "boolean"}},
        "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
    },
    "a list that may end": {"$defs": {"Node": _NODE}, "$ref": "#/$defs/Node"},
    "an endless branch beside another": {
        "$defs": {"Loop": _LOOP},
        "anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "null"}],
    },
    "an endless property that need not be": {
        "$defs": {"Loop": _LOOP},
        "properties": {"a": {"$ref": "#/$defs/Loop"}, "b": _INTEGER},
        "additionalProperties": False,
    },
    "endless items": {"$defs": {"Loop": _LOOP}, "type": "array", "items": {"$ref": "#/$defs/Loop"}},
    "a bracket in a class": {"type": "string", "pattern": "^[a[][&&b]{1,2}$"},
    "beyond a whole number": {"type": "number", "exclusiveMinimum": 2, "maximum": 2.5},
    "up to a whole number": {"type": "number", "minimum": -2.5, "exclusiveMaximum": -2},
    "a definition that is not used": {"$defs": {"No": {"not": {"type": "null"}}}, "type": "null"},
    "an impossible property": {
        "properties": {"a": {"type": "object", **_CLOSED, "minProperties": 4}, "b": _INTEGER},
        "additionalProperties": False,
    },
    "unique, or not": {"type": "array", "items": _INTEGER, "maxItems": 2, "uniqueItems": False},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "two of any name": ({"additionalProperties": _INTEGER, "minProperties": 2}, "minProperties"),
    "at most two of any name": (
        {"additionalProperties": _INTEGER, "maxProperties": 2},
        "maxProperties",
    ),
    "two by a pattern": (_LETTERS | {"minProperties": 2}, "minProperties"),
    "more than the pattern admits": (_LETTERS | {"minProperties": 3}, "minProperties"),
    "at most two by a pattern": (_LETTERS | {"maxProperties": 2}, "maxProperties"),
    "two within": (
        {"properties": {"o": {"type": "object", "minProperties": 2}}},
        "properties.o.minProperties",
    ),
    "more than are listed": (_CLOSED | {"type": "object", "minProperties": 4}, "minProperties"),
    "fewer than are required": (
        _CLOSED | {"type": "object", "required": ["a", "b"], "maxProperties": 1},
        "maxProperties",
    ),
    "more ways to choose than can be written down": (
        {
            "type": "object",
            "properties": {f"p{i}": _INTEGER for i in range(40)},
            "additionalProperties": False,
            "minProperties": 20,
        },
        "minProperties",
    ),
    "whole numbers and numbers": (
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        "oneOf: a value could match two",
    ),
    "ranges that overlap": (
        {"oneOf": [{"type": "number", "maximum": 1}, {"type": "number", "minimum": 1}]},
        "oneOf",
    ),
    "equal constants": ({"oneOf": [{"const": 1}, {"const": 1.0}]}, "oneOf"),
    "required names only": (
        _CLOSED | {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        "oneOf",
    ),
    "nothing": ({"not": {}}, "not: nothing finite"),
    "a list of nothing": ({"type": "array", "items": False, "minItems": 1}, "items: nothing"),
    "itself": ({"$defs": {"Loop": _LOOP}, "$ref": "#/$defs/Loop"}, "nothing finite"),
    "itself by two ways": (
        {
            "$defs": {
                "Loop": {"type": "object", "required": ["b"], "properties": {"b": {"$ref": "#"}}}
            },
            "allOf": [{"$ref": "#/$defs/Loop"}],
        },
        "nothing finite",
    ),
    "lists of lists": ({"$defs": {"Lists": _LISTS}, "$ref": "#/$defs/Lists"}, "nothing finite"),
    "a needed loop": (
        {
            "type": "object",
            "$defs": {"Loop": _LOOP},
            "properties": {"x": {"$ref": "#/$defs/Loop"}},
            "required": ["x"],
        },
        "properties.x.required",
    ),
    "a lone backslash": ({"type": "string", "pattern": "^a\\"}, "ends in a lone backslash"),
    "a lone backslash in a class": ({"type": "string", "pattern": "[a\\"}, "ends in a lone"),
    "a lone backslash in a name": ({"patternProperties": {"a\\\\\\": {}}}, "ends in a lone"),
    "a look ahead": (
        {"properties": {"e": {"type": "string", "pattern": "^(?!x)y"}}},
        "properties.e.pattern",
    ),
    "a keyword that no grammar follows": (
        {"properties": {"l": {"type": "array", "uniqueItems": True}}},
        "properties.l.uniqueItems",
    ),
    "a missing definition": ({"properties": {"x": {"$ref": "#/$defs/No"}}}, r"properties.x.\$ref"),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> GrammarLibrary:
    return _library(tmp_path_factory.mktemp("bytes"))


@cache
def _library(path: Path) -> GrammarLibrary:
    tokenizer = Tokenizer.load(write_tokenizer(path, byte_level()))
    return GrammarLibrary(tokenizer, tokenizer.vocab_size)


def _drawn(library: GrammarLibrary, value: dict[str, Any], seed: int) -> str:
    """Draw a text of allowed tokens, with a preference for its end."""
    matcher = library.compile(schema(value))
    source = random.Random(seed)
    mask = np.zeros(library.num_words, dtype="<u4")
    tokens: list[int] = []
    while not matcher.complete:
        matcher.fill_mask(mask.ctypes.data, library.num_words)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits).tolist()
        closing = [one for one in allowed if library.tokenizer.token_bytes(one)[:1] in b'"}]']
        ends = [one for one in allowed if one in library.eos_token_ids]
        is_long = len(tokens) > _MAX_TOKENS // 2
        if ends and (is_long or source.random() < 0.5):
            break
        liked = closing if closing and (is_long or source.random() < 0.5) else allowed
        tokens.append(source.choice(liked))
        matcher.accept((tokens[-1],))
        assert len(tokens) < _MAX_TOKENS, "it does not come to an end"
    return library.tokenizer.decode([one for one in tokens if one not in library.eos_token_ids])


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    assert len(value) == len(pairs), f"a name comes again: {pairs}"
    return value


@pytest.mark.parametrize("name", KEPT)
def test_texts_of_supported_schemas_fit_their_schema(library: GrammarLibrary, name: str) -> None:
    value = KEPT[name]
    counts = "minProperties" in str(value) or "maxProperties" in str(value)
    for seed in range(_NUM_SEEDS):
        text = _drawn(library, value, seed)
        found = json.loads(text, object_pairs_hook=_without_repeats if counts else None)
        jsonschema.validate(found, value)


_NAMES = "abcd"


def _random_schema(source: random.Random, depth: int = 0) -> dict[str, Any]:
    """Draw a schema of all kinds of keywords, many of which contradict each other."""
    kinds = ["number", "text", "values"] + ["object", "list", "choice", "both", "reference"] * (
        depth < 3
    )
    match source.choice(kinds):
        case "number":
            bounds = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
            kind = source.choice(["integer", "number"])
            keys = [source.choice(pair) for pair in bounds if source.random() < 0.7]
            return {"type": kind} | {key: source.choice([-2, 0, 0.5, 2, 2.5, 7]) for key in keys}
        case "text":
            lengths = {"minLength": source.randint(0, 2), "maxLength": source.randint(2, 5)}
            pattern = source.choice(["^a+$", "^a?b", "^[a[]x*$", "^(a|bc)", "^[ac]c$"])
            return {"type": "string"} | (lengths if source.random() < 0.5 else {"pattern": pattern})
        case "values":
            return {"enum": source.sample(["a", "b", 1, 2, None, True, [1], {"a": 1}], 3)}
        case "object":
            names = source.sample(_NAMES, source.randint(0, 4))
            more = {"additionalProperties": False} if source.random() < 0.7 else {}
            counts = {key: source.randint(0, 4) for key in ("minProperties", "maxProperties")}
            counted = {key: counts[key] for key in counts if source.random() < 0.4}
            required = source.sample(names, source.randint(0, len(names)))
            properties = {name: _random_schema(source, depth + 1) for name in names}
            return (
                {"type": "object", "properties": properties, "required": required} | more | counted
            )
        case "list":
            items = _random_schema(source, depth + 1)
            return {"type": "array", "items": items, "maxItems": source.randint(0, 3)}
        case "reference":
            return {"$ref": source.choice(["#/$defs/A", "#/$defs/B"])}
        case "both":
            return {"allOf": [_random_schema(source, depth + 1) for _ in range(2)]}
    keyword = source.choice(["oneOf", "anyOf"])
    return {keyword: [_random_schema(source, depth + 1) for _ in range(source.randint(2, 3))]}


def test_texts_of_any_accepted_schema_fit_it(library: GrammarLibrary) -> None:
    num_kept = 0
    for number in range(150):
        source = random.Random(number)
        value = _random_schema(source)
        value["$defs"] = {
            name: _random_schema(source, depth) for depth, name in ((1, "A"), (2, "B"))
        }
        try:
            library.compile(schema(value))
        except GrammarError:
            continue
        num_kept += 1
        for seed in range(3):
            jsonschema.validate(json.loads(_drawn(library, value, seed)), value)
    assert num_kept > 75


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_schemas_are_refused_by_place_and_keyword(
    library: GrammarLibrary, name: str
) -> None:
    value, words = REFUSED[name]
    with pytest.raises(GrammarError, match=words):
        library.compile(schema(value))
