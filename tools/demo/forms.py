"""Training answers in JSON, as a grammar makes the model write them.

A grammar lets the model write only text that fits its schema, but does not make it end. So the
model learns here that a text in an object is one clause of its answer, and that the object then
closes.
"""

import json
import random
import re
from typing import Any, Final

from tools.demo.faq import Pair

_NAMES: Final = (
    *("answer", "text", "name", "title", "reason", "summary", "sure", "count", "words", "score"),
    *("city", "items", "tags", "value", "kind", "id", "query", "ok", "steps", "data", "message"),
)
_CLAUSE_END: Final = re.compile(r"[.,:;!?](?:\s|$)")
_QUOTED: Final = re.compile(r"[\"\\]")


def clauses(text: str) -> list[str]:
    """Return the clauses of an answer that need no escapes in a JSON string; at least one."""
    found = [" ".join(part.split()) for part in _CLAUSE_END.split(text)]
    return [part for part in found if part and not _QUOTED.search(part)] or ["yes"]


def json_answer(pair: Pair, rng: random.Random) -> str:
    """Return an object of one to four properties with the clauses of the pair's answer as texts, in
    order; compact or with a blank after commas and colons.
    """
    left = clauses(pair.answer)
    content = _object(left, rng, depth=0)
    separators = (",", ":") if rng.random() < 0.5 else (", ", ": ")
    return json.dumps(content, separators=separators, ensure_ascii=False)


def _object(left: list[str], rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(_NAMES, rng.choice((1, 1, 2, 2, 2, 3, 4)))
    return {name: _value(left, rng, depth) for name in names}


def _value(left: list[str], rng: random.Random, depth: int) -> Any:
    draw = rng.random()
    if draw < 0.5:
        return left.pop(0) if len(left) > 1 else left[0]
    if draw < 0.68:
        return rng.random() < 0.8
    if draw < 0.84:
        return rng.randint(1, 99)
    if draw < 0.88:
        return None
    if depth == 2 or draw < 0.94:
        return [left.pop(0) if len(left) > 1 else left[0]]
    return _object(left, rng, depth + 1)
