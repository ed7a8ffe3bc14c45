"""Makes an AsyncAPI 3 document of channels and the structs that they carry."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from millrace.bus import codec
from millrace.bus.contract.schemas import components
from millrace.schemas.control import WorkerCommand
from millrace.schemas.frames import Frame
from millrace.schemas.jobs import MAX_NAME_CHARACTERS, Tier
from millrace.schemas.json_schema import REF, Schema

# Unions of structs, by the names that their messages have.
_UNIONS = {"Frame": Frame, "WorkerCommand": WorkerCommand}
# What a job checks by itself.
_NAME: Schema = {"maxLength": MAX_NAME_CHARACTERS}
_JOB_BOUNDS = {"request_id": {"minLength": 1, **_NAME}, "reply": _NAME, "tenant": _NAME}
_JOBS = "jobs."

Action = Literal["send", "receive"]


@dataclass(frozen=True)
class Channel:
    """One kind of subject or topic. ``action`` is what Millrace does with it; ``kinds`` are what it
    carries, in each of ``content_types``; one of ``answers`` comes back on the message's reply
    subject, in the same encodings."""

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
    """The AsyncAPI document of channels, ready for JSON."""
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
    """A message in one encoding; the name of one in JSON ends in Json."""
    name, is_json = _name(kind), content_type == codec.JSON
    return {
        "name": f"{name}Json" if is_json else name,
        "title": f"{name} in {'JSON' if is_json else 'MessagePack'}",
        "contentType": content_type,
        "payload": {"$ref": REF.format(name=name)},
    }


def _name(kind: Any) -> str:
    """A struct's own name; that of a union is in ``_UNIONS``."""
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
