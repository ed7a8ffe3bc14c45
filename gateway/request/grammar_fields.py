"""The fields of a request that ask for a grammar."""

from __future__ import annotations

import msgspec

from registry.tool_formats.grammar import may_be_closed
from schemas.errors import ParameterError
from schemas.openai import (
    NOT_GIVEN,
    ChatFields,
    GenerationFields,
    JsonObjectFormat,
    JsonSchemaFormat,
    ResponseFormat,
)
from schemas.sampling import SCHEMA_SETTINGS, Grammar, GrammarKind

_WHITESPACE = "guided_whitespace_pattern"
_MAX_PATTERN_CHARACTERS = 256


def grammar_of(request: GenerationFields) -> Grammar | None:
    """The one grammar that a request asks for, if it does. Raises ParameterError."""
    asked: dict[str, Grammar] = {}
    if isinstance(request, ChatFields):
        form = request.response_format
        if isinstance(form, JsonObjectFormat | JsonSchemaFormat):
            asked["response_format"] = _of_format(form)
    if request.guided_json != NOT_GIVEN:
        text = _schema_text("guided_json", request.guided_json)
        asked["guided_json"] = _grammar("guided_json", GrammarKind.JSON_SCHEMA, text)
    if request.guided_regex is not None:
        asked["guided_regex"] = _grammar("guided_regex", GrammarKind.REGEX, request.guided_regex)
    if request.guided_grammar is not None:
        asked["guided_grammar"] = _grammar(
            "guided_grammar", GrammarKind.EBNF, request.guided_grammar
        )
    if len(asked) > 1:
        raise ParameterError(
            next(reversed(asked)), f"Only one grammar is taken; give one of {', '.join(asked)}."
        )
    grammar = next(iter(asked.values()), None)
    if request.guided_whitespace_pattern is None:
        return grammar
    return _with_whitespace(grammar, request.guided_whitespace_pattern)


def _with_whitespace(grammar: Grammar | None, pattern: str) -> Grammar:
    """The grammar of JSON with ``pattern`` between the parts of a document, as the keyword of its
    schema that the grammar library takes its settings by. Raises ParameterError."""
    if grammar is None or grammar.kind not in (GrammarKind.JSON_OBJECT, GrammarKind.JSON_SCHEMA):
        raise ParameterError(_WHITESPACE, f"{_WHITESPACE} goes only with JSON.")
    if not pattern or len(pattern) > _MAX_PATTERN_CHARACTERS:
        raise ParameterError(
            _WHITESPACE, f"{_WHITESPACE} must have 1 to {_MAX_PATTERN_CHARACTERS} characters."
        )
    try:
        schema = msgspec.json.decode(grammar.text or '{"type":"object"}')
    except (msgspec.DecodeError, RecursionError) as error:
        raise ParameterError("guided_json", f"guided_json is not valid JSON: {error}") from error
    if not isinstance(schema, dict) or SCHEMA_SETTINGS in schema:
        raise ParameterError(
            _WHITESPACE,
            f"{_WHITESPACE} goes only with a schema that is an object without {SCHEMA_SETTINGS}.",
        )
    schema[SCHEMA_SETTINGS] = {"whitespace_pattern": pattern}
    text = msgspec.json.encode(schema).decode()
    return _grammar(_WHITESPACE, GrammarKind.JSON_SCHEMA, text)


def _of_format(form: ResponseFormat) -> Grammar:
    if isinstance(form, JsonSchemaFormat):
        field = "response_format.json_schema.schema"
        text = _schema_text(field, form.json_schema.schema)
        if not form.json_schema.strict:
            text = _closed(text)
        return _grammar(field, GrammarKind.JSON_SCHEMA, text)
    return Grammar(kind=GrammarKind.JSON_OBJECT)


def _schema_text(field: str, raw: msgspec.Raw) -> str:
    """The schema as it was written; a schema within a string is taken out of it."""
    try:
        value = msgspec.json.decode(raw)
        if isinstance(value, str):
            return value
        if isinstance(value, dict):
            return bytes(raw).decode()
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ParameterError(field, f"{field} is not valid JSON: {error}") from error
    raise ParameterError(field, f"{field} must be a JSON Schema, which is an object.")


def _closed(text: str) -> str:
    """An object of listed properties has no others unless the schema says so, as in tools: authors
    of schemas that are not strict leave that out, and models would go on and on."""
    try:
        schema = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text  # it is refused with all others that are no JSON
    if isinstance(schema, dict) and schema.get("properties") and may_be_closed(schema):
        return '{"additionalProperties":false,' + text.lstrip().removeprefix("{")
    return text


def _grammar(field: str, kind: GrammarKind, text: str) -> Grammar:
    try:
        return Grammar(kind=kind, text=text)
    except ParameterError as error:
        raise ParameterError(field, error.message) from error
