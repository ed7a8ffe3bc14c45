"""Schemas in a portable form, which client generators of any language can read.

Generators make a type of each object with properties and of each union, so each of these is a
component with a name. Enumerations are not components: in Go their values would be constants of one
package, such as COMPLETED, and two enumerations could not have the same value. Generators need the
type of each enumeration and the schema of each list's entries. They make a field with a default a
required one, so the fields of requests have none.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from itertools import chain, combinations, starmap
from typing import Any, NamedTuple

from millrace.schemas.json_schema import REF, Schema, pascal

_TYPE_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number"}
_NULL: Schema = {"type": "null"}
_MAX_INT32 = 2**31 - 1
_MAX_INT64 = 2**63 - 1


class Use(NamedTuple):
    """Use of a schema: in requests, in answers, or in both."""

    is_asked: bool
    is_answered: bool


class Components:
    """Named schemas of a document, with names for the objects and unions inside them."""

    def __init__(
        self, given: dict[str, Schema], asked: Collection[str], answered: Collection[str]
    ) -> None:
        """Take the components ``given``. ``asked`` names the components that requests have,
        ``answered`` the components that answers have."""
        self.schemas: dict[str, Schema] = {}
        self._given = {REF.format(name=name): one for name, one in given.items()}
        self._unions = {
            json.dumps(one["anyOf"]): name for name, one in given.items() if "anyOf" in one
        }
        for name, schema in given.items():
            if "enum" not in schema:
                self._add(name, schema, Use(name in asked, name in answered))

    def _add(self, name: str, schema: Schema, use: Use) -> None:
        written = self._written(schema, schema.get("title", name), use)
        self._name(name, {"title": name, **written})

    def portable(self, schema: Schema, title: str, use: Use) -> Schema:
        """Return ``schema``, or a reference to it if it is added as the component ``title``."""
        title = schema.get("title", title)
        written = self._written(schema, title, use)
        for keyword in ("anyOf", "oneOf"):
            values = [option for option in written.get(keyword, ()) if option != _NULL]
            if len(values) > 1:
                name = self._unions.get(json.dumps(values)) or self._name(
                    title, {"title": title, **written, keyword: values}
                )
                reference = {"$ref": REF.format(name=name)}
                if len(values) == len(written[keyword]):
                    return reference
                return {"title": f"{title}OrNull", "anyOf": [reference, _NULL]}
        if "properties" in written:
            return {"$ref": REF.format(name=self._name(title, {"title": title, **written}))}
        return written

    def _field(self, name: str, schema: Schema, parent: str, use: Use) -> Schema:
        written = self.portable(schema, parent + pascal(name), use)
        for part in (written, *written.get("anyOf", ())):
            if "enum" in part:  # generators put the parent's name before this themselves
                part["title"] = pascal(name)
        return written

    def _name(self, name: str, schema: Schema) -> str:
        if self.schemas.setdefault(name, schema) != schema:
            raise ValueError(f"two schemas have the title {name}: give one of them another")
        return name

    def _written(self, schema: Schema, title: str, use: Use) -> Schema:
        schema = _without_default(schema, use)
        if "enum" in self._resolved(schema):
            schema = self._resolved(schema)
        if "anyOf" in schema:
            return self._union(schema, title, use)
        if None in schema.get("enum", ()):
            return self._union({"anyOf": [schema]}, title, use)
        if "enum" in schema:
            return _enumeration(schema, title)
        written = dict(schema)
        for key, suffix in (("items", "Item"), ("additionalProperties", "Value")):
            if isinstance(schema.get(key), dict):
                written[key] = self.portable(schema[key], title + suffix, use)
        if "properties" in schema:
            written["properties"] = {
                name: self._field(name, field, title, use)
                for name, field in schema["properties"].items()
            }
        return _completed(written, use)

    def _union(self, schema: Schema, title: str, use: Use) -> Schema:
        options = _options(schema)
        values = [option for option in options if option != _NULL]
        is_nullable = len(values) < len(options)
        more = {key: value for key, value in schema.items() if key != "anyOf"}
        if len(values) == 1 and is_nullable:
            value = self.portable(values[0], title, use)
            if "type" in value and not value.keys() & {"enum", "const"}:
                return {**value, **more, "type": [value["type"], "null"]}
            return {"title": f"{title}OrNull", **more, "anyOf": [value, _NULL]}
        if any(_is_any_object(value) for value in values):
            return {"title": title, "description": _told(values), **more}
        written = [
            self.portable(option, title + _option_name(option, i), use)
            for i, option in enumerate(values, 1)
        ]
        resolved = [self._resolved(value) for value in values]
        if tag := _tag(resolved):
            tags = [_values(value)[tag][0] for value in resolved]
            mapping = {name: option["$ref"] for name, option in zip(tags, written, strict=True)}
            more["discriminator"] = {"propertyName": tag, "mapping": mapping}
        # Some clients read tags as plain strings: several objects would fit their input.
        num_objects = sum(value.get("type") == "object" for value in resolved)
        is_one = (num_objects < 2 or not use.is_answered) and all(
            starmap(_exclude_each_other, combinations(resolved, 2))
        )
        keyword = "oneOf" if is_one else "anyOf"
        return {"title": title, **more, keyword: written + [_NULL] * is_nullable}

    def _resolved(self, schema: Schema) -> Schema:
        return self._given.get(schema.get("$ref", ""), schema)


def _values(schema: Schema) -> dict[str, tuple[Any, ...]]:
    """Return the values of each field of an object that takes certain values only."""
    values: dict[str, tuple[Any, ...]] = {}
    for name, field in schema.get("properties", {}).items():
        options = _options(field)
        if all("enum" in option or option == _NULL for option in options):
            values[name] = tuple(chain.from_iterable(one.get("enum", (None,)) for one in options))
    return values


def _tag(options: list[Schema]) -> str | None:
    """Return the field that each of these objects must have with a value of its own."""
    values = [_values(option) for option in options]
    for name in values[0]:
        is_required = all(name in option.get("required", ()) for option in options)
        tags = [one.get(name, ()) for one in values]
        if is_required and all(len(one) == 1 for one in tags) and len(set(tags)) == len(tags):
            return name
    return None


def _exclude_each_other(one: Schema, other: Schema) -> bool:
    """Return whether no value fits both: by its type, by a field that one object must have and that
    has other values in the other, or by a field that only one has, and must have."""
    types = {one.get("type", "string"), other.get("type", "string")}
    if types != {"object"}:
        return len(types) == 2 and types != {"integer", "number"}
    values, others = _values(one), _values(other)
    for required, closed in ((one.get("required", ()), other), (other.get("required", ()), one)):
        if any(
            name in values and name in others and not set(values[name]) & set(others[name])
            for name in required
        ):
            return True
        if (
            closed.get("additionalProperties") is False
            and set(required) - closed["properties"].keys()
        ):
            return True
    return False


def _options(schema: Schema) -> list[Schema]:
    """Return what a union, or an enumeration with null in it, may be: no option is a union."""
    if "anyOf" in schema:
        return [option for inner in schema["anyOf"] for option in _options(inner)]
    values = [value for value in schema.get("enum", ()) if value is not None]
    if len(values) < len(schema.get("enum", ())):
        return [schema | {"enum": values}, _NULL]
    return [schema]


def _completed(schema: Schema, use: Use) -> Schema:
    """Return the schema with what its type leaves open: entries, further properties, precision."""
    kind = schema.get("type")
    if kind == "array":
        return {"items": {}, **schema}
    if kind == "object" and "properties" not in schema:
        return {"additionalProperties": True, **schema}
    if kind == "number":
        return {"format": "double", **schema}
    # The gateway bounds integers in requests only where the schema says so.
    largest = schema.get("maximum", 0 if use.is_asked else _MAX_INT64)
    if kind == "integer" and largest > _MAX_INT32:
        return {"format": "int64", **schema}
    return schema


def _without_default(schema: Schema, use: Use) -> Schema:
    """Return the schema without a default that generators misread: null, that of a union or of a
    reference, and in a request any. There the description names it."""
    if "default" not in schema:
        return schema
    default = schema["default"]
    if not use.is_asked and default is not None and not schema.keys() & {"anyOf", "$ref"}:
        return schema
    kept = {key: value for key, value in schema.items() if key != "default"}
    if default is None or not use.is_asked:
        return kept
    told = f"Default: {json.dumps(default)}."
    return kept | {"description": f"{kept.get('description', '')} {told}".strip()}


def _enumeration(schema: Schema, title: str) -> Schema:
    values = schema["enum"]
    typed = {"type": _TYPE_NAMES[type(values[0])], **schema}
    if len(values) > 1:
        return {"title": title, **typed}
    return {key: value for key, value in typed.items() if key != "enum"} | {"const": values[0]}


def _is_any_object(schema: Schema) -> bool:
    return schema.get("type") == "object" and "properties" not in schema


def _told(options: list[Schema]) -> str:
    """Return the description of a value that generators cannot type: one of them takes the name of
    a map for the name of a class.
    """
    return " Or: ".join(option.get("description", f"{option['type']}.") for option in options)


def _option_name(option: Schema, position: int) -> str:
    kinds = option.get("properties", {}).get("type", {}).get("enum", ())
    if len(kinds) == 1:
        return pascal(kinds[0])
    if "enum" in option:
        return "Word"
    return "List" if option.get("type") == "array" else f"Option{position}"
