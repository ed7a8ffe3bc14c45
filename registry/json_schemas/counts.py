"""``minProperties`` and ``maxProperties``, expressed by other keywords as far as possible."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from millrace.registry.json_schemas.walk import listed, number, table
from millrace.schemas.sampling import SCHEMA_SETTINGS

MIN, MAX = "minProperties", "maxProperties"
# Keywords that stand once, at the top of a schema.
OF_THE_WHOLE = frozenset({"$schema", "$id", "$defs", "definitions", SCHEMA_SETTINGS})
_MAX_FORMS = 64
# With only these keywords, an object can be split into forms without repeating anything else.
_PLAIN = frozenset(
    {
        *("type", "properties", "required", "additionalProperties", MIN, MAX),
        *("title", "description", "default", "examples", "deprecated", "$comment"),
    }
)


def counted_forms(schema: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return the forms of an object with a bounded number of properties, without that bound: any of
    them may match. None if the count cannot be enforced.

    Unlisted properties cannot be counted, since their names may repeat. Listed ones can be counted
    by which are required and which are allowed.
    """
    properties = {
        name: one for name, one in table(schema, "properties").items() if one is not False
    }
    required = list(
        dict.fromkeys(name for name in listed(schema, "required") if name in properties)
    )
    is_listed = len(required) == len(set(map(str, listed(schema, "required"))))
    least, most = number(schema, MIN) or 0, number(schema, MAX)
    bare = {key: value for key, value in schema.items() if key not in (MIN, MAX)}
    is_closed = (
        is_listed
        and schema.get("additionalProperties") is False
        and not table(schema, "patternProperties")
    )
    num_needed = len(set(map(str, listed(schema, "required"))))
    if most is None or (is_closed and most >= len(properties)):
        most = None
    if least <= num_needed and most is None:
        return [bare]
    if not is_closed:
        return _open_forms(schema, bare, least, most, has_optional=len(properties) > num_needed)
    if not schema.keys() <= _PLAIN | OF_THE_WHOLE:
        return None
    optional = [name for name in properties if name not in required]
    forms = list(
        itertools.islice(_closed_forms(bare, required, optional, int(least), most), _MAX_FORMS + 1)
    )
    return forms if len(forms) <= _MAX_FORMS else None


def _open_forms(
    schema: dict[str, Any],
    bare: dict[str, Any],
    least: float,
    most: float | None,
    *,
    has_optional: bool,
) -> list[dict[str, Any]] | None:
    """Return the forms of an object that allows unlisted properties: only a count up to 1 can be
    enforced, as one name cannot repeat.
    """
    if has_optional or least > 1 or (most is not None and most > 1):
        return None
    return [bare | {key: schema[key] for key in (MIN, MAX) if key in schema}]


def _closed_forms(
    bare: dict[str, Any],
    required: list[str],
    optional: list[str],
    least: int,
    most: float | None,
) -> Iterator[dict[str, Any]]:
    num_more = max(0, least - len(required))
    num_allowed = len(optional) if most is None else int(most) - len(required)
    if num_allowed < num_more:
        return
    for allowed in itertools.combinations(optional, min(num_allowed, len(optional))):
        gone = set(optional) - set(allowed)
        properties = {name: one for name, one in bare["properties"].items() if name not in gone}
        for more in itertools.combinations(allowed, num_more):
            yield bare | {"properties": properties, "required": [*required, *more]}
