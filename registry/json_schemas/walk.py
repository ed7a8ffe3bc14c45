"""Traversal of a schema and its references."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Limit of visits: definitions that refer to one another have endless paths.
_MAX_VISITS = 20_000
_MAX_REFERENCES = 32

TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})


class Visits:
    """Budget of schemas that may still be visited."""

    def __init__(self) -> None:
        self._num_left = _MAX_VISITS

    def take(self) -> bool:
        """Take one visit, and return whether the budget allowed it."""
        self._num_left -= 1
        return self._num_left >= 0


def referred(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the target of a reference within ``root``; None if there is none."""
    if not reference.startswith("#"):
        return None
    place: Any = root
    for step in reference[1:].strip("/").split("/"):
        name = step.replace("~1", "/").replace("~0", "~")
        if not name:
            continue
        if isinstance(place, list) and name.isdecimal() and int(name) < len(place):
            place = place[int(name)]
        elif isinstance(place, Mapping) and name in place:
            place = place[name]
        else:
            return None
    return place


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return the schema, or the target of a schema that is only a reference."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            return schema
        if not {*schema} <= {"$ref", "title", "description", "default", "$comment"}:
            return schema
        schema = referred(schema["$ref"], root)
    return None


def types_of(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the kinds of values that ``type`` admits; an integer is a number."""
    kinds = schema.get("type")
    named = kinds if isinstance(kinds, list) else [kinds]
    if kinds is None:
        return TYPES
    return frozenset("number" if one == "integer" else one for one in named if isinstance(one, str))


def listed(schema: Mapping[str, Any], key: str) -> list[Any]:
    """Return the value of a keyword that is a list; empty otherwise."""
    value = schema.get(key)
    return value if isinstance(value, list) else []


def table(schema: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the value of a keyword that maps names to schemas; empty otherwise."""
    value = schema.get(key)
    return value if isinstance(value, dict) else {}


def number(schema: Mapping[str, Any], key: str) -> float | int | None:
    """Return the value of a keyword that is a number; None otherwise."""
    value = schema.get(key)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


_COUNTS = frozenset(
    {
        *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
        *("minContains", "maxContains"),
    }
)
# The contents of these are values, not schemas.
_VALUES = frozenset({"const", "enum", "default", "examples"})


def with_whole_counts(schema: Any) -> Any:
    """Return the schema with ``3`` instead of ``3.0`` in counting keywords: the grammar library
    takes no float there.
    """
    if isinstance(schema, list):
        return [with_whole_counts(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {name: _value_of(name, value) for name, value in schema.items()}


def _value_of(name: str, value: Any) -> Any:
    if name in _COUNTS and isinstance(value, float) and value.is_integer():
        return int(value)
    return value if name in _VALUES else with_whole_counts(value)
