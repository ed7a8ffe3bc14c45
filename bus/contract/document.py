"""AsyncAPI 3 document from channels and the structs that they carry."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from millrace.bus import codec
from millrace.schemas.control import WorkerCommand
from millrace.schemas.frames import Frame
from millrace.schemas.jobs import MAX_NAME_CHARACTERS, Tier
from millrace.schemas.json_schema import REF, Schema, pascal, without_discriminators

_TAG = "type"
_NULL = {"type": "null"}
_PLAIN_TYPES = ("string", "integer", "number", "boolean", "null")
# Integers that may exceed 2^53, beyond which JavaScript numbers are not exact.
_NANOSECONDS, _WIDE = re.compile(r"\w+_ns"), re.compile(r"\w+_ns|seed|priority")
_NANOSECONDS_NOTE = "Nanoseconds since 1970-01-01 UTC."
_WIDE_NOTE = "A 64-bit integer: see the note on numbers."


def components(
    kinds: Sequence[Any], unions: Mapping[str, Any], bounds: Mapping[str, Mapping[str, Schema]]
) -> dict[str, Schema]:
    """Return the schemas of ``kinds`` and of all types inside them, by name.

    Args:
        kinds: The types.
        unions: Tagged unions of structs, by name.
        bounds: Keywords that the structs check themselves, by struct and field.
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
    """Schema writer. ``unions`` are the members of named unions."""

    def __init__(self, unions: Mapping[str, list[Schema]]) -> None:
        self._unions = unions

    def schema(self, schema: Schema, title: str) -> Schema:
        """Return a schema with a title, and the same for all schemas inside it."""
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
            # Java rejects a number like 6 as the default of a Long or Double.
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
    """Return whether code generators need a name for the schema."""
    return "enum" in schema or schema.get("type") not in _PLAIN_TYPES


def _without_default(schema: Schema) -> Schema:
    """Return a schema without a null or empty default, as unset fields are left out."""
    written = dict(schema)
    if written.get("default", "") in (None, (), [], {}):
        del written["default"]
    return written


def _without_null(schema: Schema) -> Schema:
    """Return a property's schema without null. Null is read as unset and never sent."""
    types = [one for one in schema.get("anyOf", ()) if one != _NULL]
    if len(types) == len(schema.get("anyOf", ())):
        return schema
    rest = {keyword: value for keyword, value in schema.items() if keyword != "anyOf"}
    return {**types[0], **rest} if len(types) == 1 else {**rest, "anyOf": types}


def _typed_enum(values: Sequence[Any]) -> Schema:
    (kind,) = {type(value) for value in values}
    return {"type": {str: "string", int: "integer"}[kind]}


def _noted(schema: Schema, name: str) -> Schema:
    """Return a property with the note that its name implies for its numbers."""
    if schema.get("type") != "integer" or not _WIDE.fullmatch(name):
        return schema
    said = [_NANOSECONDS_NOTE] if _NANOSECONDS.fullmatch(name) else []
    said += [_WIDE_NOTE, schema.get("description", "")]
    return {**schema, "description": " ".join(said).strip()}


# Unions of structs, by name.
_UNIONS = {"Frame": Frame, "WorkerCommand": WorkerCommand}
# Bounds that a job checks itself.
_NAME: Schema = {"maxLength": MAX_NAME_CHARACTERS}
_JOB_BOUNDS = {"request_id": {"minLength": 1, **_NAME}, "reply": _NAME, "tenant": _NAME}
_JOBS = "jobs."

Action = Literal["send", "receive"]


@dataclass(frozen=True)
class Channel:
    """Kind of subject or topic.

    ``action`` is Millrace's part. The channel carries ``kinds`` in each of ``content_types``. One
    of ``answers`` is sent to the message's reply subject, in the same encodings.
    """

    key: str
    address: str
    title: str
    action: Action
    kinds: tuple[Any, ...]
    description: str
    answers: tuple[Any, ...] = ()
    protocol: Literal["nats", "kafka"] = "nats"
    content_types: tuple[str, ...] = (codec.MSGPACK,)


_ENCODED = "As one subject token: see the note on subjects."
_PARAMETERS: dict[str, Schema] = {
    "model": {
        "description": f"A model of the catalogue. {_ENCODED}",
        "examples": ["qwen3%2E5-8b"],
    },
    "tier": {"description": "The service tier.", "enum": [tier.value for tier in Tier]},
    "reason": {"description": "Why the job was given up on.", "examples": ["malformed"]},
    "reply": {
        "description": "The listener: a gateway's id, or the tenant's name, alone or with a slash "
        f"and a name behind it. {_ENCODED}",
        "examples": ["acme", "acme%2Fmailer"],
    },
    "gateway": {"description": f"The gateway's id. {_ENCODED}"},
    "request": {
        "description": f"The request id, of 1 to {MAX_NAME_CHARACTERS} characters. {_ENCODED}",
        "examples": ["report-7", "report%2E7"],
    },
    "tenant": {"description": f"The tenant. {_ENCODED}", "examples": ["acme"]},
    "worker": {"description": f"The worker's id. {_ENCODED}"},
}
_DESCRIPTION = f"""Generation jobs in, frames and records out. Made from schemas/ by \
python -m millrace.bus.asyncapi.

**Subjects.** A model, tenant, request id or listener is one token of a subject: letters, digits, \
- and _ stay, and every other byte of its UTF-8 text is % with two hexadecimal digits in capitals. \
So a dot is %2E, a slash %2F, a space %20. The text _ alone is %5F, and the empty text is %. \
Encode a name so for the subject only: in a body it stands as it is.

**Encodings.** A message is MessagePack, or JSON with the header \
{codec.CONTENT_TYPE}: {codec.JSON}. A job without the header is JSON if its body begins with {{.

**Fields that are not set** are left out by Millrace.

**Numbers.** Integers have 64 bits. Times in nanoseconds (fields *_ns) and a seed or priority of \
your choice may be above 2^53, where JavaScript's numbers are not exact. Times may be rounded: \
JSON.parse and numbers will do (Date.now() * 1e6). To keep every digit of the others, send them as \
BigInt with a JSON library that writes it as a number, or in MessagePack with 64-bit integers \
(useBigInt64 of @msgpack/msgpack). Do not send them as text."""


def document(listed: Sequence[Channel]) -> Schema:
    """Return the AsyncAPI document of channels, ready for JSON."""
    kinds = {_name(kind): kind for one in listed for kind in (*one.kinds, *one.answers)}
    structs = [kind for name, kind in kinds.items() if name not in _UNIONS]
    jobs = [kind for one in listed if one.address.startswith(_JOBS) for kind in one.kinds]
    bounds = {_name(kind): _JOB_BOUNDS for kind in jobs}
    schemas = components(structs, _UNIONS, bounds)
    messages: dict[str, Schema] = {}
    channels: dict[str, Schema] = {}
    operations: dict[str, Schema] = {}

    def carry(kinds: Sequence[Any], content_types: Sequence[str]) -> dict[str, Schema]:
        made = [_message(kind, one) for kind in kinds for one in content_types] or [_EMPTY]
        messages.update({one["name"]: one for one in made})
        return {one["name"]: _reference("components/messages", one["name"]) for one in made}

    for one in listed:
        channels[one.key] = {
            "address": one.address,
            "title": one.title,
            "description": one.description,
            "messages": carry(one.kinds, one.content_types),
            "servers": [_reference("servers", one.protocol)],
            **_parameters(one.address),
        }
        operation: Schema = {
            "action": one.action,
            "channel": _reference("channels", one.key),
            "title": one.title,
        }
        operations[f"{one.action}{_capital(one.key)}"] = operation
        if one.answers:
            key = f"{one.key}Answers"
            operation["reply"] = {"channel": _reference("channels", key)}
            channels[key] = {
                "address": None,
                "title": f"Answers: {one.title}",
                "messages": carry(one.answers, one.content_types),
                "servers": [_reference("servers", "nats")],
            }
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Millrace",
            "version": "1.0.0",
            "description": _DESCRIPTION,
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": codec.MSGPACK,
        "servers": {
            "nats": {"host": "127.0.0.1:4222", "protocol": "nats"},
            "kafka": {"host": "127.0.0.1:9092", "protocol": "kafka"},
        },
        "channels": channels,
        "operations": operations,
        "components": {"messages": messages, "schemas": schemas},
    }


_EMPTY: Schema = {"name": "Empty", "title": "Nothing: the payload is empty"}


def _message(kind: Any, content_type: str) -> Schema:
    """Return a message in one encoding. The name of a JSON message ends in Json."""
    name, is_json = _name(kind), content_type == codec.JSON
    return {
        "name": f"{name}Json" if is_json else name,
        "title": f"{name} in {'JSON' if is_json else 'MessagePack'}",
        "contentType": content_type,
        "payload": {"$ref": REF.format(name=name)},
    }


def _name(kind: Any) -> str:
    """Return the name of a struct, or that of a union in ``_UNIONS``."""
    for name, union in _UNIONS.items():
        if kind == union:
            return name
    name = kind.__name__
    return str(name)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _reference(section: str, name: str) -> Schema:
    return {"$ref": f"#/{section}/{name}"}


def _parameters(address: str) -> Schema:
    names = re.findall(r"\{(\w+)\}", address)
    return {"parameters": {name: _PARAMETERS[name] for name in names}} if names else {}
