"""Productive schemas: those matched by some finite value. A schema that requires itself has none,
and its grammar never ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millrace.registry.json_schemas.walk import listed, number, referred, table, types_of

# Limit on references; with more of them, none is followed.
_MAX_REFERENCES = 1_000
_SCALARS = frozenset({"null", "boolean", "number", "string"})


class Productive:
    """Test of whether schemas within ``root`` have a finite value, judged by references and empty
    lists. The library finds other contradictions.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        # By reference: false until a value is found.
        self._known: dict[str, bool] = {}
        # By id of a schema, once all references are known.
        self._found: dict[int, bool] = {}
        self._is_settled = False
        found = references(root)
        if len(found) <= _MAX_REFERENCES:
            self._settle(found)
        self._is_settled = True

    def has_value(self, schema: Any) -> bool:
        """Return whether some finite value matches a schema within the root."""
        if not isinstance(schema, dict):
            return schema is not False
        if not self._is_settled:
            return self._look(schema)
        found = self._found.get(id(schema))
        if found is None:
            found = self._found[id(schema)] = self._look(schema)
        return found

    def _look(self, schema: Mapping[str, Any]) -> bool:
        reference = schema.get("$ref")
        if isinstance(reference, str) and not self._known.get(reference, True):
            return False
        if schema.get("not") in ({}, True):
            return False
        if "enum" in schema and schema["enum"] == []:
            return False
        if not all(map(self.has_value, listed(schema, "allOf"))):
            return False
        for key in ("anyOf", "oneOf"):
            if listed(schema, key) and not any(map(self.has_value, listed(schema, key))):
                return False
        if "const" in schema or "enum" in schema:
            return True
        kinds = types_of(schema)
        return (
            not kinds.isdisjoint(_SCALARS)
            or ("array" in kinds and self._has_array(schema))
            or ("object" in kinds and self._has_object(schema))
            or kinds.isdisjoint({"array", "object"})
        )

    def _has_array(self, schema: Mapping[str, Any]) -> bool:
        needed = int(number(schema, "minItems") or 0)
        first = listed(schema, "prefixItems") or listed(schema, "items")
        if not all(map(self.has_value, first[:needed])):
            return False
        rest = schema.get("items", True) if not isinstance(schema.get("items"), list) else True
        return needed <= len(first) or self.has_value(rest)

    def _has_object(self, schema: Mapping[str, Any]) -> bool:
        properties = table(schema, "properties")
        names = (name for name in listed(schema, "required") if isinstance(name, str))
        return all(self.has_value(properties.get(name, True)) for name in names)

    def _settle(self, found: set[str]) -> None:
        """Find the references that have a value. A reference that uses a found one is checked
        again.
        """
        targets = {one: referred(one, self._root) for one in found}
        targets = {one: target for one, target in targets.items() if target is not None}
        self._known = dict.fromkeys(targets, False)
        users: dict[str, set[str]] = {one: set() for one in targets}
        for one, target in targets.items():
            for needed in references(target) & targets.keys():
                users[needed].add(one)
        left = set(targets)
        while left:
            one = left.pop()
            if not self._known[one] and self.has_value(targets[one]):
                self._known[one] = True
                left |= users[one]


def references(node: Any) -> set[str]:
    """Return all references in a schema."""
    found: set[str] = set()
    nodes = [node]
    while nodes:
        one = nodes.pop()
        if isinstance(one, dict):
            if isinstance(one.get("$ref"), str):
                found.add(one["$ref"])
            nodes += one.values()
        elif isinstance(one, list):
            nodes += one
    return found
