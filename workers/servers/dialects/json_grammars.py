"""JSON schemas for servers that use the same grammar library as the own engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from millrace.engine.grammar.library import ANY_OBJECT, JSON_BLANKS
from millrace.schemas.sampling import MAX_GRAMMAR_CHARACTERS, SCHEMA_SETTINGS, Grammar, GrammarKind


def with_few_blanks(grammar: Grammar) -> Grammar:
    """Return the grammar with whitespace only after colons and commas, no more than the own engine
    allows.

    Older versions of the library do not bound other whitespace, where a model can get stuck. Other
    kinds of grammars stay as they are. So do invalid JSON schemas, which the server reports, and
    schemas that would become too long.
    """
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
    """Return settings that allow blanks after separators only, by the ``given`` pattern or the own
    engine's.
    """
    blanks = given.get("whitespace_pattern", JSON_BLANKS)
    rigid = {
        "whitespace_flexible": False,
        "key_separator": f":({blanks})?",
        "item_separator": f",({blanks})?",
    }
    return rigid | {name: value for name, value in given.items() if name != "whitespace_pattern"}
