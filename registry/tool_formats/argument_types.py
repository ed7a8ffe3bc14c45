"""Argument types of a tool, by its schema: names and admitted types."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from millrace.registry.tool_formats.python_literals import json_of
from millrace.schemas.tools import ToolDefinition

_DEFINITIONS = ("$defs", "definitions")
_MAX_FORMS = 16
_MAX_DEPTH = 8
# Limit of visits: definitions that refer to one another have endless paths.
_MAX_VISITS = 1_000


class FlatSchema(NamedTuple):
    """Form of a call's arguments: the schema of each argument, in order, and the required ones.

    Each schema is self-contained, with the definitions that it needs.
    """

    properties: dict[str, Any]
    required: frozenset[str]


class Walk:
    """Bounded traversal of a schema and its references in ``root``."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.root = root
        self._num_left = _MAX_VISITS

    def enters(self, schema: Any, depth: int) -> bool:
        """Return whether to visit a schema at this depth; false if it is not a schema."""
        self._num_left -= 1
        return isinstance(schema, dict) and depth <= _MAX_DEPTH and self._num_left >= 0


def listed(schema: Mapping[str, Any], key: str) -> list[Any]:
    """Return the value of a keyword that is a list; empty otherwise."""
    value = schema.get(key)
    return value if isinstance(value, list) else []


def flat_schemas(schema: Mapping[str, Any]) -> list[FlatSchema]:
    """Return the forms of an object: its properties merged with those of ``allOf`` and of one of
    ``anyOf`` or ``oneOf``. Unlisted properties are in none of them.
    """
    return [
        FlatSchema(
            {name: _alone(one, schema) for name, one in _with_required(form).items()},
            form.required,
        )
        for form in _forms(schema, Walk(schema), 0)
    ]


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return the target of a schema that is only a reference into ``root``; otherwise the schema. A
    dangling reference admits everything.
    """
    for _ in range(_MAX_DEPTH):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            break
        schema = _referred(schema["$ref"], root)
    return schema


def _forms(schema: Any, walk: Walk, depth: int) -> list[FlatSchema]:
    if not walk.enters(schema, depth):
        return [FlatSchema({}, frozenset())]
    properties = schema.get("properties")
    forms = [
        FlatSchema(
            dict(properties) if isinstance(properties, dict) else {},
            frozenset(name for name in listed(schema, "required") if isinstance(name, str)),
        )
    ]
    for parts in _parts(schema, walk.root):
        others = [form for part in parts for form in _forms(part, walk, depth + 1)]
        forms = [_both(one, other) for one in forms for other in others][:_MAX_FORMS]
    return forms


def _parts(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Iterator[Sequence[Any]]:
    """Yield further constraints on an object; it must match one schema of each sequence."""
    if isinstance(schema.get("$ref"), str):
        yield [_referred(schema["$ref"], root)]
    for part in listed(schema, "allOf"):
        yield [part]
    for key in ("anyOf", "oneOf"):
        if parts := listed(schema, key):
            yield parts


def _both(one: FlatSchema, other: FlatSchema) -> FlatSchema:
    properties = dict(one.properties)
    for name, schema in other.properties.items():
        properties[name] = {"allOf": [properties[name], schema]} if name in properties else schema
    return FlatSchema(properties, one.required | other.required)


def _with_required(form: FlatSchema) -> dict[str, Any]:
    """Return the properties, including required ones without a schema."""
    return form.properties | {name: {} for name in sorted(form.required - form.properties.keys())}


def _alone(schema: Any, root: Mapping[str, Any]) -> Any:
    if not isinstance(schema, dict) or '"$ref"' not in json.dumps(schema):
        return schema
    return {key: root[key] for key in _DEFINITIONS if key in root} | schema


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    place: Any = root
    for step in reference.removeprefix("#").strip("/").split("/"):
        name = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(place, dict) or (step and name not in place):
            return {}
        place = place[name] if step else place
    return place


Kinds = frozenset[str]

TEXT: Kinds = frozenset({"string"})
_KINDS: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}


def kinds_of(schema: Any, root: Mapping[str, Any]) -> Kinds | None:
    """Return the types of the values that a schema admits; None if it does not say."""
    return kinds_on(Walk(root), schema, 0)


class ArgumentTypes:
    """Argument types of the tools that a model knows.

    Arguments of other tools, and arguments that a schema does not list, are read as JSON if
    possible, otherwise as text.
    """

    def __init__(self, tools: Sequence[ToolDefinition] = ()) -> None:
        self._tools = {tool.name: tool.parameters or {} for tool in tools}
        self._listed: dict[str, dict[str, list[Any]]] = {}

    def is_text(self, tool: str, name: str) -> bool:
        """Return whether the argument is text in any case."""
        return self._kinds_of(tool, name) == TEXT

    def as_json(self, tool: str, name: str, text: str) -> str:
        """Return the argument as JSON."""
        kinds = self._kinds_of(tool, name)
        if kinds == TEXT:
            return json.dumps(text, ensure_ascii=False)
        told = json_of(text.strip())
        if told is not None and (kinds is None or _fits(told, kinds, text)):
            return told
        if told is None or "string" in (kinds or ()):
            return json.dumps(text, ensure_ascii=False)
        return told

    def _kinds_of(self, tool: str, name: str) -> Kinds | None:
        root = self._tools.get(tool, {})
        schemas = self._of(tool).get(name)
        return None if not schemas else kinds_of({"anyOf": schemas}, root)

    def _of(self, tool: str) -> dict[str, list[Any]]:
        """Return the schemas of each argument in all forms of a tool's arguments."""
        known = self._listed.get(tool)
        if known is None:
            known = self._listed[tool] = {}
            for form in flat_schemas(self._tools.get(tool, {})):
                for name, schema in form.properties.items():
                    known.setdefault(name, []).append(schema)
        return known


def _fits(told: str, kinds: Kinds, text: str) -> bool:
    value = json.loads(told)
    kind = _KINDS[type(value)]
    if kind == "string":
        # Quoted text beside other types is JSON.
        return "string" in kinds and text.lstrip().startswith('"')
    if kind == "integer":
        return not kinds.isdisjoint({"integer", "number"})
    return kind in kinds or (kind == "number" and "integer" in kinds and value.is_integer())


def kinds_on(walk: Walk, schema: Any, depth: int) -> Kinds | None:
    """Return the types as ``kinds_of`` does, within a running traversal."""
    schema = resolved(schema, walk.root)
    if not walk.enters(schema, depth):
        return None
    if "const" in schema:
        return frozenset({_KINDS.get(type(schema["const"]), "string")})
    kind = schema.get("type")
    if isinstance(schema.get("enum"), list):
        told_by_values = frozenset(_KINDS.get(type(value), "string") for value in schema["enum"])
        return told_by_values & TEXT if kind == "string" else told_by_values
    if isinstance(kind, str):
        return frozenset({kind})
    if isinstance(kind, list):
        return frozenset(one for one in kind if isinstance(one, str))
    for key in ("anyOf", "oneOf"):
        if branches := listed(schema, key):
            return _any_of([kinds_on(walk, one, depth + 1) for one in branches])
    told = [kinds_on(walk, one, depth + 1) for one in listed(schema, "allOf")]
    known = [kinds for kinds in told if kinds is not None]
    return frozenset.intersection(*known) if known else None


def _any_of(told: Sequence[Kinds | None]) -> Kinds | None:
    union: Kinds = frozenset()
    for kinds in told:
        if kinds is None:
            return None
        union |= kinds
    return union
