"""Test of whether schemas exclude each other, so that no value matches two of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from millrace.registry.json_schemas.walk import (
    TYPES,
    Visits,
    listed,
    number,
    resolved,
    table,
    types_of,
)

_MAX_CHOICES = 64
_MAX_DEPTH = 8
_LENGTHS = {"string": ("minLength", "maxLength"), "array": ("minItems", "maxItems")}


class Exclusion:
    """Comparer of schemas within ``root`` until its budget of visits is spent."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._visits = Visits()

    def holds(self, choices: Sequence[Any], kinds: frozenset[str] = TYPES) -> bool:
        """Return whether certainly no value of these ``kinds`` matches two of the schemas. False
        also if it takes too many visits to find out.
        """
        if len(choices) > _MAX_CHOICES:
            return False
        pairs = itertools.combinations(choices, 2)
        return all(self._excludes(one, other, kinds, 0) for one, other in pairs)

    def _excludes(self, one: Any, other: Any, kinds: frozenset[str], depth: int) -> bool:
        one, other = resolved(one, self._root), resolved(other, self._root)
        if one is False or other is False:
            return True
        if not isinstance(one, dict) or not isinstance(other, dict):
            return False
        if depth > _MAX_DEPTH or not self._visits.take():
            return False
        common = types_of(one) & types_of(other) & kinds
        if all(self._excludes_as(kind, one, other, depth) for kind in common):
            return True
        return any(
            all(self._excludes(part, whole, kinds, depth + 1) for part in parts)
            for schema, whole in ((one, other), (other, one))
            for parts in _parts(schema)
        )

    def _excludes_as(
        self, kind: str, one: Mapping[str, Any], other: Mapping[str, Any], depth: int
    ) -> bool:
        """Return whether no value of that kind matches both."""
        values, others = _values(one, kind), _values(other, kind)
        if values is not None and others is not None:
            return not any(_equal(a, b) for a in values for b in others)
        if values is not None or others is not None:
            fixed, free = (values, other) if values is not None else (others, one)
            return all(self._is_outside(value, free, depth) for value in fixed or ())
        if kind == "number":
            return _apart(_range(one), _range(other))
        if kind in _LENGTHS:
            return _apart(_lengths(one, kind), _lengths(other, kind))
        return kind == "object" and self._objects_exclude(one, other, depth)

    def _is_outside(self, value: Any, schema: Mapping[str, Any], depth: int) -> bool:
        """Return whether the value certainly does not match, because of its size or one of its
        parts.
        """
        match value:
            case bool() | None:
                return False
            case int() | float():
                return _apart(_Range(value, value, False, False, False), _range(schema))
            case str():
                size = len(value)
                return _apart(_Range(size, size, False, False, True), _lengths(schema, "string"))
            case list():
                size, items = len(value), schema.get("items", True)
                within = isinstance(items, dict) and "prefixItems" not in schema
                return _apart(
                    _Range(size, size, False, False, True), _lengths(schema, "array")
                ) or any(within and self._is_no(one, items, depth) for one in value)
        properties = table(schema, "properties")
        return any(name not in value for name in listed(schema, "required")) or any(
            _has_no_place_for(name, schema) or self._is_no(one, properties.get(name, True), depth)
            for name, one in value.items()
        )

    def _is_no(self, value: Any, schema: Any, depth: int) -> bool:
        return self._excludes({"const": value}, schema, TYPES, depth + 1)

    def _objects_exclude(
        self, one: Mapping[str, Any], other: Mapping[str, Any], depth: int
    ) -> bool:
        """Return whether a property excludes the objects from each other.

        Both require it with values that exclude each other, or one requires it and the other
        forbids it.
        """
        for schema, whole in ((one, other), (other, one)):
            mine, its = table(schema, "properties"), table(whole, "properties")
            for name in listed(schema, "required"):
                if _has_no_place_for(name, whole):
                    return True
                if (
                    name in mine
                    and name in its
                    and name in listed(whole, "required")
                    and self._excludes(mine[name], its[name], TYPES, depth + 1)
                ):
                    return True
        return False


def _parts(schema: Mapping[str, Any]) -> list[list[Any]]:
    """Return further lists of schemas; a value must match one schema of each list."""
    parts = [[part] for part in listed(schema, "allOf")]
    return parts + [listed(schema, key) for key in ("anyOf", "oneOf") if listed(schema, key)]


def _has_no_place_for(name: Any, schema: Mapping[str, Any]) -> bool:
    properties = table(schema, "properties")
    if name in properties:
        return properties[name] is False
    return schema.get("additionalProperties") is False and not table(schema, "patternProperties")


def _kind(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def _values(schema: Mapping[str, Any], kind: str) -> list[Any] | None:
    """Return the values of a kind that the schema lists; None if it does not list its values."""
    if "const" in schema:
        values = [schema["const"]]
    elif isinstance(schema.get("enum"), list):
        values = schema["enum"]
    else:
        return None
    return [value for value in values if _kind(value) == kind]


def _equal(one: Any, other: Any) -> bool:
    """Return whether two values are equal in JSON Schema: 1 equals 1.0, and true does not equal
    1.
    """
    if _kind(one) != _kind(other):
        return False
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    return bool(one == other)


class _Range:
    """Range of numbers from ``least`` to ``most``, inclusive unless ``opens_least`` or
    ``opens_most``.
    """

    def __init__(
        self, least: float, most: float, opens_least: bool, opens_most: bool, is_whole: bool
    ) -> None:
        if is_whole:
            # The smallest and largest whole numbers are inclusive bounds.
            if math.isfinite(least):
                floor = math.floor(least)
                least = floor + 1 if opens_least or floor < least else floor
            if math.isfinite(most):
                ceiling = math.ceil(most)
                most = ceiling - 1 if opens_most or ceiling > most else ceiling
            opens_least = opens_most = False
        self.least, self.most = least, most
        self.opens_least, self.opens_most = opens_least, opens_most
        self.is_whole = is_whole


def _range(schema: Mapping[str, Any]) -> _Range:
    kinds = schema.get("type")
    is_whole = kinds == "integer" or (
        isinstance(kinds, list) and "integer" in kinds and "number" not in kinds
    )
    least, opens_least = _bound(schema, "minimum", "exclusiveMinimum", -math.inf, max)
    most, opens_most = _bound(schema, "maximum", "exclusiveMaximum", math.inf, min)
    return _Range(least, most, opens_least, opens_most, is_whole)


def _bound(
    schema: Mapping[str, Any], key: str, exclusive: str, none: float, tighter: Any
) -> tuple[float, bool]:
    included, excluded = number(schema, key), number(schema, exclusive)
    if excluded is None:
        # The form of drafts before draft 6.
        return (none, False) if included is None else (included, schema.get(exclusive) is True)
    if included is None or tighter(included, excluded) == excluded:
        return excluded, True
    return included, False


def _lengths(schema: Mapping[str, Any], kind: str) -> _Range:
    least, most = (number(schema, key) for key in _LENGTHS[kind])
    return _Range(
        0 if least is None else least, math.inf if most is None else most, False, False, True
    )


def _apart(one: _Range, other: _Range) -> bool:
    """Return whether two ranges have no number in common."""
    low, high = (one, other) if (one.least, one.most) <= (other.least, other.most) else (other, one)
    if low.most < high.least or low.most < low.least or high.most < high.least:
        return True
    if low.most == high.least:
        return low.opens_most or high.opens_least
    least, most = max(low.least, high.least), min(low.most, high.most)
    if (low.is_whole or high.is_whole) and math.isfinite(least) and math.isfinite(most):
        between = _Range(least, most, _opens(low, high, least), _opens_top(low, high, most), True)
        return between.most < between.least
    return False


def _opens(one: _Range, other: _Range, least: float) -> bool:
    return any(each.least == least and each.opens_least for each in (one, other))


def _opens_top(one: _Range, other: _Range, most: float) -> bool:
    return any(each.most == most and each.opens_most for each in (one, other))
