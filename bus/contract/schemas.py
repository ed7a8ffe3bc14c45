"""Schemas that generators of code turn into classes with sensible names.

What ``msgspec`` makes is right for validators, but leaves generators without names and types: enums
have no type, unions and lists inside a class have no title, and an optional field is a union with
null. A generator calls such classes ``AnonymousSchema_275``, or takes them for anything at all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from millrace.schemas.json_schema import REF, Schema, pascal, without_discriminators

_TAG = "type"
_NULL = {"type": "null"}
_PLAIN_TYPES = ("string", "integer", "number", "boolean", "null")
# Integers that may be above 2^53, where JavaScript's numbers are not exact any more.
_NANOSECONDS, _WIDE = re.compile(r"\w+_ns"), re.compile(r"\w+_ns|seed|priority")
_NANOSECONDS_NOTE = "Nanoseconds since 1970-01-01 UTC."
_WIDE_NOTE = "A 64-bit integer: see the note on numbers."


def components(
    kinds: Sequence[Any], unions: Mapping[str, Any], bounds: Mapping[str, Mapping[str, Schema]]
) -> dict[str, Schema]:
    """The schemas of ``kinds``, and of all that they are made of, by their names.

    ``unions`` are tagged unions of structs, by the names that they get. ``bounds`` are keywords
    that the structs check by themselves, by struct and field.
    """
    made, found = msgspec.json.schema_components([*kinds, *unions.values()], ref_template=REF)
    schemas: dict[str, Schema] = without_discriminators(found)
    members = {name: one["anyOf"] for name, one in zip(unions, made[len(kinds) :], strict=True)}
    for struct, fields in bounds.items():
        for field, keywords in fields.items():
            schemas[struct]["properties"][field] |= keywords
    writer = _Writer(members)
    named = {name: writer.schema(schema, name) for name, schema in schemas.items()}
    for name, one in members.items():
        named[name] = {"title": name, "type": "object", "discriminator": _TAG, "oneOf": one}
    return named


class _Writer:
    """Writes schemas anew. ``unions`` are the members of named unions."""

    def __init__(self, unions: Mapping[str, list[Schema]]) -> None:
        self._unions = unions

    def schema(self, schema: Schema, title: str) -> Schema:
        """A schema with a title, and with all that is in it."""
        for name, members in self._unions.items():
            if schema.get("anyOf") == members:
                return {"$ref": REF.format(name=name)}
        written = _without_default(schema)
        if "$ref" in written:
            return written
        if "enum" in written:
            written |= _typed_enum(written["enum"])
        if written.get("type") == "integer":
            written["format"] = "int64"
        if written.get("type") in ("integer", "number") and written.get("default"):
            # Java does not take a number like 6 as the default of a Long or Double.
            said = written.get("description", "")
            written["description"] = f"{said} Default: {written.pop('default')}.".strip()
        if "description" in written:
            written["description"] = " ".join(written["description"].split())
        if "properties" in written:
            written["properties"] = {
                name: _noted(self.schema(_without_null(one), f"{title}{pascal(name)}"), name)
                for name, one in written["properties"].items()
            }
        for keyword, suffix in (("items", "Item"), ("additionalProperties", "Value")):
            if isinstance(written.get(keyword), dict):
                written[keyword] = self.schema(written[keyword], f"{title}{suffix}")
        for keyword, suffix in (("prefixItems", "Item"), ("anyOf", "Choice")):
            if keyword in written:
                written[keyword] = [
                    self.schema(one, f"{title}{suffix}{number}")
                    for number, one in enumerate(written[keyword], start=1)
                ]
        if _makes_a_class(written):
            written.setdefault("title", title)
        return written


def _makes_a_class(schema: Schema) -> bool:
    """Whether a generator of code needs a name for it."""
    return "enum" in schema or schema.get("type") not in _PLAIN_TYPES


def _without_default(schema: Schema) -> Schema:
    """A field that is not set is left out: that it is null, or an empty list or object, needs no
    default."""
    written = dict(schema)
    if written.get("default", "") in (None, (), [], {}):
        del written["default"]
    return written


def _without_null(schema: Schema) -> Schema:
    """The schema of a property. Null is read as a field that is not set, and is never sent."""
    types = [one for one in schema.get("anyOf", ()) if one != _NULL]
    if len(types) == len(schema.get("anyOf", ())):
        return schema
    rest = {keyword: value for keyword, value in schema.items() if keyword != "anyOf"}
    return {**types[0], **rest} if len(types) == 1 else {**rest, "anyOf": types}


def _typed_enum(values: Sequence[Any]) -> Schema:
    (kind,) = {type(value) for value in values}
    return {"type": {str: "string", int: "integer"}[kind]}


def _noted(schema: Schema, name: str) -> Schema:
    """A property with what its name says of its numbers."""
    if schema.get("type") != "integer" or not _WIDE.fullmatch(name):
        return schema
    said = [_NANOSECONDS_NOTE] if _NANOSECONDS.fullmatch(name) else []
    said += [_WIDE_NOTE, schema.get("description", "")]
    return {**schema, "description": " ".join(said).strip()}
