"""Fields of a request that ask for a grammar."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from millrace.registry.requests.message_fields import refuse_unhonoured
from millrace.registry.tool_formats.closed_schema import may_be_closed, with_closed_parts
from millrace.runtime.json.faults import json_fault
from millrace.schemas.errors import ParameterError
from millrace.schemas.openai import (
    NOT_GIVEN,
    ChatFields,
    CompletionRequest,
    GenerationFields,
    JsonObjectFormat,
    JsonSchemaFormat,
    ResponseFormat,
    StructuredOutputs,
)
from millrace.schemas.sampling import SCHEMA_SETTINGS, Grammar, GrammarKind, one_of

_FORMAT = "response_format"
_FORMAT_SCHEMA = f"{_FORMAT}.json_schema.schema"
_STRUCTURED = "structured_outputs"
MAX_PATTERN_CHARACTERS = 256
# Unsupported fields of structured_outputs, with the values that demand nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "disable_additional_properties": (None, False),
    "disable_fallback": (None, False),
    "structural_tag": (None,),
}
_NO_BLANKS = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}


class AskedGrammar(NamedTuple):
    """Grammar, and the field that it comes from."""

    grammar: Grammar
    field: str


def grammar_of(request: GenerationFields) -> AskedGrammar | None:
    """Return the one grammar that a request asks for; None without one. Raises ParameterError."""
    asked = dict(_asked(request))
    if len(asked) > 1:
        raise ParameterError(
            next(reversed(asked)), f"Only one grammar is allowed; give one of {', '.join(asked)}."
        )
    field, grammar = next(iter(asked.items()), ("", None))
    if field == _FORMAT and grammar is not None and grammar.kind is GrammarKind.JSON_SCHEMA:
        field = _FORMAT_SCHEMA
    for blanks_field, settings in _blanks(request):
        grammar = _with_blanks(grammar, blanks_field, settings)
    return None if grammar is None else AskedGrammar(grammar, field)


def grammar_field(request: GenerationFields) -> str | None:
    """Return the field with which a request asks for a grammar; None without one. Raises
    ParameterError.
    """
    return next((field for field, _ in _asked(request)), None)


def _asked(request: GenerationFields) -> Iterator[tuple[str, Grammar]]:
    """Yield each grammar with the field that asks for it."""
    if isinstance(request, ChatFields | CompletionRequest):
        form = request.response_format
        if isinstance(form, JsonObjectFormat | JsonSchemaFormat):
            yield _FORMAT, _of_format(form)
    yield from _of_fields(
        "guided_",
        request.guided_json,
        request.guided_regex,
        request.guided_choice,
        request.guided_grammar,
    )
    yield from _of_sglang(request)
    outputs = request.structured_outputs
    if outputs is not None:
        yield from _of_structured(outputs)


def _of_sglang(request: GenerationFields) -> Iterator[tuple[str, Grammar]]:
    if request.json_schema != NOT_GIVEN:
        text = _schema_text("json_schema", request.json_schema)
        yield "json_schema", _grammar("json_schema", GrammarKind.JSON_SCHEMA, text)
    if request.regex is not None:
        yield "regex", _grammar("regex", GrammarKind.REGEX, request.regex)
    if request.ebnf is not None:
        yield "ebnf", _grammar("ebnf", GrammarKind.EBNF, request.ebnf)


def _of_structured(outputs: StructuredOutputs) -> Iterator[tuple[str, Grammar]]:
    refuse_unhonoured(outputs, NEUTRAL, f"{_STRUCTURED}.")
    asked = dict(
        _of_fields(f"{_STRUCTURED}.", outputs.json, outputs.regex, outputs.choice, outputs.grammar)
    )
    if outputs.json_object:
        asked[f"{_STRUCTURED}.json_object"] = Grammar(kind=GrammarKind.JSON_OBJECT)
    if not asked:
        raise ParameterError(
            _STRUCTURED,
            f"{_STRUCTURED} must have one of json, json_object, regex, choice and grammar.",
        )
    yield from asked.items()


def _of_fields(
    prefix: str,
    schema: msgspec.Raw,
    pattern: str | None,
    choice: tuple[str, ...] | None,
    grammar: str | None,
) -> Iterator[tuple[str, Grammar]]:
    if schema != NOT_GIVEN:
        field = f"{prefix}json"
        yield field, _grammar(field, GrammarKind.JSON_SCHEMA, _schema_text(field, schema))
    if pattern is not None:
        field = f"{prefix}regex"
        yield field, _grammar(field, GrammarKind.REGEX, pattern)
    if choice is not None:
        field = f"{prefix}choice"
        yield field, _grammar(field, GrammarKind.REGEX, one_of(field, choice))
    if grammar is not None:
        field = f"{prefix}grammar"
        yield field, _grammar(field, GrammarKind.EBNF, grammar)


def _blanks(request: GenerationFields) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the whitespace settings of the grammar library that a request asks for, each with its
    field.
    """
    patterns = {"guided_whitespace_pattern": request.guided_whitespace_pattern}
    outputs = request.structured_outputs
    if outputs is not None:
        patterns[f"{_STRUCTURED}.whitespace_pattern"] = outputs.whitespace_pattern
    for field, pattern in patterns.items():
        if pattern is None:
            continue
        if not 1 <= len(pattern) <= MAX_PATTERN_CHARACTERS:
            raise ParameterError(
                field, f"{field} must have 1 to {MAX_PATTERN_CHARACTERS} characters."
            )
        yield field, {"whitespace_pattern": pattern}
    if outputs is not None and outputs.disable_any_whitespace:
        yield f"{_STRUCTURED}.disable_any_whitespace", _NO_BLANKS


def _with_blanks(grammar: Grammar | None, field: str, settings: Mapping[str, Any]) -> Grammar:
    """Return the JSON grammar with ``settings`` in its schema. Raises ParameterError naming
    ``field``.
    """
    if grammar is None or grammar.kind not in (GrammarKind.JSON_OBJECT, GrammarKind.JSON_SCHEMA):
        raise ParameterError(field, f"{field} is allowed only with JSON.")
    try:
        schema = msgspec.json.decode(grammar.text or '{"type":"object"}')
    except (msgspec.DecodeError, RecursionError) as error:
        raise ParameterError(field, f"{field} needs a schema in JSON: {error}") from error
    if not isinstance(schema, dict) or SCHEMA_SETTINGS in schema:
        raise ParameterError(
            field,
            f"{field} is allowed only with a schema that is an object without {SCHEMA_SETTINGS}, "
            "and without other whitespace fields.",
        )
    schema[SCHEMA_SETTINGS] = settings
    return _grammar(field, GrammarKind.JSON_SCHEMA, msgspec.json.encode(schema).decode())


def _of_format(form: ResponseFormat) -> Grammar:
    if isinstance(form, JsonSchemaFormat):
        text = _schema_text(_FORMAT_SCHEMA, form.json_schema.schema)
        if not form.json_schema.strict:
            text = _closed(text)
        return _grammar(_FORMAT_SCHEMA, GrammarKind.JSON_SCHEMA, text)
    return Grammar(kind=GrammarKind.JSON_OBJECT)


def _schema_text(field: str, raw: msgspec.Raw) -> str:
    """Return the text of a schema, unwrapped if it is in a JSON string."""
    try:
        value = msgspec.json.decode(raw)
        if isinstance(value, str):
            return value
        if isinstance(value, dict):
            return bytes(raw).decode()
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ParameterError(
            field, f"{field} is not valid JSON: {json_fault(bytes(raw), error)}."
        ) from error
    raise ParameterError(field, f"{field} must be a JSON Schema, which is an object.")


def _closed(text: str) -> str:
    """Close objects with listed properties, unless the schema says otherwise, as for tools.

    Authors of schemas that are not strict leave ``additionalProperties`` out, and models would
    generate properties without end.
    """
    try:
        schema = msgspec.json.decode(text)
        if not isinstance(schema, dict):
            return text
        closed = with_closed_parts(schema)
    except (msgspec.DecodeError, RecursionError):
        return text  # refused later with all other invalid JSON
    if schema.get("properties") and may_be_closed(schema):
        closed = {"additionalProperties": False} | closed
    return text if closed == schema else msgspec.json.encode(closed).decode()


def _grammar(field: str, kind: GrammarKind, text: str) -> Grammar:
    try:
        return Grammar(kind=kind, text=text)
    except ParameterError as error:
        raise ParameterError(field, error.message) from error
