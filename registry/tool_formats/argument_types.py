"""The arguments of a tool by its schema: their names, and what each of them may be."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from millrace.registry.tool_formats.python_literals import json_of
from millrace.schemas.tools import ToolDefinition

_DEFINITIONS = ("$defs", "definitions")
_MAX_FORMS = 16
_MAX_DEPTH = 8
# Definitions that refer to one another have no end of ways through them.
_MAX_VISITS = 1_000


class FlatSchema(NamedTuple):
    """One form that the arguments may have: the schema of each, in order, and which must be there.
    Each schema stands by itself, with the definitions that it needs."""

    properties: dict[str, Any]
    required: frozenset[str]


class Walk:
    """A way through a schema and what it refers to in ``root``, of bounded length."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.root = root
        self._num_left = _MAX_VISITS

    def enters(self, schema: Any, depth: int) -> bool:
        """Whether to look into a schema that is so deep; it cannot be looked into if it is none."""
        self._num_left -= 1
        return isinstance(schema, dict) and depth <= _MAX_DEPTH and self._num_left >= 0


def listed(schema: Mapping[str, Any], key: str) -> list[Any]:
    """The value of a keyword that has a list; an empty one if it has none."""
    value = schema.get(key)
    return value if isinstance(value, list) else []


def flat_schemas(schema: Mapping[str, Any]) -> list[FlatSchema]:
    """The forms of an object: its properties with those of ``allOf`` and of one of ``anyOf`` or
    ``oneOf``. Properties that a schema does not list are in none of them."""
    return [
        FlatSchema(
            {name: _alone(one, schema) for name, one in _with_required(form).items()},
            form.required,
        )
        for form in _forms(schema, Walk(schema), 0)
    ]


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """What a schema that is nothing but a reference into ``root`` refers to; else itself. A
    reference to nothing admits everything."""
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
    """What else an object must match: one of each sequence."""
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
    """The properties, and those that must be there though nothing is said of them."""
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
    """The types of what a schema admits; None: it does not say."""
    return kinds_on(Walk(root), schema, 0)


class ArgumentTypes:
    """Of the tools that a model was told of. Arguments of others, and those that a schema does not
    list, are what JSON makes of them, else text."""

    def __init__(self, tools: Sequence[ToolDefinition] = ()) -> None:
        self._tools = {tool.name: tool.parameters or {} for tool in tools}
        self._listed: dict[str, dict[str, list[Any]]] = {}

    def is_text(self, tool: str, name: str) -> bool:
        """Whether the argument is text, whatever it looks like."""
        return self._kinds_of(tool, name) == TEXT

    def as_json(self, tool: str, name: str, text: str) -> str:
        """The argument in JSON."""
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
        """The schemas that each argument has in the forms that the arguments may have."""
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
        # In quotes, beside other types, it is JSON.
        return "string" in kinds and text.lstrip().startswith('"')
    if kind == "integer":
        return not kinds.isdisjoint({"integer", "number"})
    return kind in kinds or (kind == "number" and "integer" in kinds and value.is_integer())


def kinds_on(walk: Walk, schema: Any, depth: int) -> Kinds | None:
    """As ``kinds_of``, within a walk that is under way."""
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
