"""JSON schemas for servers that read grammars by the library of the own engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from millrace.engine.grammar.library import ANY_OBJECT, JSON_BLANKS
from millrace.schemas.sampling import MAX_GRAMMAR_CHARACTERS, SCHEMA_SETTINGS, Grammar, GrammarKind


def with_few_blanks(grammar: Grammar) -> Grammar:
    """One for JSON with blanks only behind a colon and a comma, and no more of them than the own
    engine allows: older versions of the library bound no other blanks, where a model gets stuck.
    What is no JSON schema stays as it is, for the server to say, as do other grammars and those
    that there is no room in for more."""
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            text = ANY_OBJECT
        case GrammarKind.JSON_SCHEMA:
            text = grammar.text
        case _:
            return grammar
    try:
        schema = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return grammar
    given = schema.get(SCHEMA_SETTINGS, {}) if isinstance(schema, dict) else None
    if not isinstance(given, dict):
        return grammar
    text = msgspec.json.encode(schema | {SCHEMA_SETTINGS: _settings(given)}).decode()
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        return grammar
    return Grammar(kind=GrammarKind.JSON_SCHEMA, text=text)


def _settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Blanks behind separators alone, by the pattern that is ``given`` or the own engine's."""
    blanks = given.get("whitespace_pattern", JSON_BLANKS)
    rigid = {
        "whitespace_flexible": False,
        "key_separator": f":({blanks})?",
        "item_separator": f",({blanks})?",
    }
    return rigid | {name: value for name, value in given.items() if name != "whitespace_pattern"}
