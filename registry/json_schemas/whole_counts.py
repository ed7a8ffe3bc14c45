"""Counts in a schema that a program has written as floats."""

from __future__ import annotations

from typing import Any

_COUNTS = frozenset(
    {
        *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
        *("minContains", "maxContains"),
    }
)
# What is in these is a value, not a schema.
_VALUES = frozenset({"const", "enum", "default", "examples"})


def with_whole_counts(schema: Any) -> Any:
    """The schema with ``3`` in place of ``3.0`` where a keyword counts: the library of grammars
    takes no float there."""
    if isinstance(schema, list):
        return [with_whole_counts(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {name: _value_of(name, value) for name, value in schema.items()}


def _value_of(name: str, value: Any) -> Any:
    if name in _COUNTS and isinstance(value, float) and value.is_integer():
        return int(value)
    return value if name in _VALUES else with_whole_counts(value)
