"""JSON schemas for servers that read grammars by the library of the own engine."""

from __future__ import annotations

from typing import Any

import msgspec

from schemas.sampling import Grammar, GrammarKind
from workers.engine.grammar.library import ANY_OBJECT, JSON_BLANKS

_BLANKS = {
    "whitespace_flexible": False,
    "key_separator": f":({JSON_BLANKS})?",
    "item_separator": f",({JSON_BLANKS})?",
}


def guidance_schema(grammar: Grammar) -> str | dict[str, Any]:
    """With blanks only behind a colon and a comma, and no more of them than the own engine allows:
    older versions of the library bound no other blanks, where a model gets stuck. What is no JSON
    stays as it is, for the server to say."""
    text = ANY_OBJECT if grammar.kind is GrammarKind.JSON_OBJECT else grammar.text
    try:
        schema = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
    if not isinstance(schema, dict):
        return text
    given = schema.get("x-guidance")
    options = given if isinstance(given, dict) else {}
    return schema | {"x-guidance": _BLANKS | options}
