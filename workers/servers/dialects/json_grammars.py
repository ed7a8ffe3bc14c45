"""JSON schemas for servers that read grammars by the library of the own engine."""

from __future__ import annotations

from typing import Any

import msgspec

from schemas.sampling import Grammar, GrammarKind
from workers.engine.grammar.library import ANY_OBJECT, JSON_BLANKS


def guidance_schema(grammar: Grammar) -> str | dict[str, Any]:
    """As the own engine reads it, by a key that the library takes. What is no JSON stays as it is,
    for the server to say."""
    text = ANY_OBJECT if grammar.kind is GrammarKind.JSON_OBJECT else grammar.text
    try:
        schema = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
    if not isinstance(schema, dict):
        return text
    given = schema.get("x-guidance")
    options = given if isinstance(given, dict) else {}
    return schema | {"x-guidance": {"whitespace_pattern": JSON_BLANKS} | options}
