"""Arguments that a model writes as plain text: what they are is for the tools' schemas to say."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from millrace.registry.tool_formats.flat_schema import Walk, flat_schemas, listed, resolved
from millrace.registry.tool_formats.python_literals import json_of
from millrace.schemas.tools import ToolDefinition

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
