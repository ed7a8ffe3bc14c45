"""Closed schemas: their objects have the listed properties and no others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_CLOSES = "additionalProperties"
# Keywords that define an object's properties elsewhere; such a schema stays open.
_ELSEWHERE = frozenset({"$ref", "allOf", "anyOf", "oneOf", "patternProperties", "propertyNames"})
# Keywords that combine several schemas of one object. Closed, each would refuse the others'
# properties.
_TOGETHER = frozenset(
    {
        *("allOf", "if", "then", "else", "not", "dependentSchemas", "dependencies"),
        *("unevaluatedProperties", "$dynamicRef", "$recursiveRef"),
    }
)
_NAMED = ("properties", "$defs", "definitions")  # schemas by their names
_SINGLE = ("items", _CLOSES)
_VALUES = frozenset({"const", "default", "enum", "examples"})  # no schemas
_CHOICES = ("anyOf", "oneOf")  # of the same value


def may_be_closed(schema: Mapping[str, Any]) -> bool:
    """Return whether a schema of an object can be closed: it does not define other properties
    outside ``properties``.
    """
    return _CLOSES not in schema and _ELSEWHERE.isdisjoint(schema)


def with_closed_parts(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with its inner objects closed.

    An inner object that lists properties gets no others, unless it says so or is one of several
    schemas of an object. The schema's own object stays as it is.

    Raises:
        RecursionError: the schema is nested too deeply.
    """
    if _puts_together(schema):
        return schema
    return _within(schema)


def _puts_together(node: Any) -> bool:
    """Return whether several schemas of one object are combined anywhere."""
    if isinstance(node, list):
        return any(map(_puts_together, node))
    if not isinstance(node, dict):
        return False
    is_further = "properties" in node and not {*_CHOICES, "$ref"}.isdisjoint(node)
    if is_further or not _TOGETHER.isdisjoint(node):
        return True
    return any(
        any(map(_puts_together, value.values()))
        if key in _NAMED and isinstance(value, dict)
        else key not in _VALUES and _puts_together(value)
        for key, value in node.items()
    )


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    found = _within(schema)
    if isinstance(schema.get("properties"), dict) and schema["properties"] and may_be_closed(found):
        found[_CLOSES] = False
    return found


def _within(schema: dict[str, Any]) -> dict[str, Any]:
    found = dict(schema)
    for key in _NAMED:
        if isinstance(schema.get(key), dict):
            found[key] = {name: _closed(one) for name, one in schema[key].items()}
    for key in _SINGLE:
        if key in schema:
            found[key] = _closed(schema[key])
    if isinstance(schema.get("prefixItems"), list):
        found["prefixItems"] = [_closed(one) for one in schema["prefixItems"]]
    for key in _CHOICES:
        if isinstance(schema.get(key), list):
            choices = schema[key]
            found[key] = [_within(one) if isinstance(one, dict) else one for one in choices]
    return found
