"""The gateway's contracts as documents, made from the schemas: HTTP as OpenAPI 3.1, the messages of
the WebSocket as a JSON Schema.

``python -m gateway.openapi.document`` writes docs/openapi.json and docs/websocket.schema.json anew.
"""

from __future__ import annotations

import re
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.openapi.fields import REF, refine
from gateway.openapi.operation import JSON, Operation, Schema
from gateway.openapi.operations import OPERATIONS
from schemas.openai import ErrorBody
from schemas.responses import GivenCall, GivenCallOutput, GivenMessage
from schemas.websocket import SUBPROTOCOL, ClientMessage, ServerMessage

_DOCS = Path(__file__).parents[2] / "docs"
_SSE = "text/event-stream"
_DEFINITION = "#/$defs/{name}"
_NAMES = {ClientMessage: "ClientMessage", ServerMessage: "ServerMessage"}
_OF_ALL_CALLERS = (401, 403, 503)

_DESCRIPTION = f"""\
OpenAI's API on a message bus. Fields that are not honoured are refused by name; every error has \
the shape of ErrorBody and a stable code.

Beside HTTP there is a WebSocket at /v1/ws, subprotocol {SUBPROTOCOL}; /v1/ws/schema.json \
describes its messages."""

_ERRORS = {
    400: "A field, a header or the whole body is not what is taken; param names it.",
    401: "No API key where one is demanded, or one that is not good.",
    403: "The key, the tier or the page's origin may not do this.",
    404: "There is no such thing, or it is not the caller's.",
    408: "The body did not arrive in time.",
    409: "It cannot be done as things stand.",
    413: "The body is too large; the message names both sizes.",
    429: "A limit is reached or the queue is full; the code names which.",
    500: "The gateway or the engine failed.",
    503: "Something that is needed is away, or the gateway shuts down; nothing was accepted.",
    504: "The answer was not there in time.",
}
_STREAMED = (
    "Done. With stream: true, events: the data of each is an x-event, [DONE] or an ErrorBody."
)
_REQUEST_ID: Schema = {
    "description": "The id under which the request is known here.",
    "schema": {"type": "string"},
}
_RETRY_AFTER: Schema = {
    "description": "Seconds after which it may be tried again.",
    "schema": {"type": "integer", "minimum": 1},
}
_RATE_LIMITS: dict[str, Schema] = {
    f"x-ratelimit-{aspect}-{what}": {
        "description": text.format(what=what),
        "schema": {"type": "string" if aspect == "reset" else "integer"},
    }
    for what in ("requests", "tokens")
    for aspect, text in (
        ("limit", "How many {what} a minute are allowed, if there is a limit."),
        ("remaining", "How many {what} are left now."),
        ("reset", "When all {what} are back, such as 6m0s."),
    )
}
_ROUTED: dict[str, Schema] = {
    "x-millrace-model": {
        "description": "The model that answers.",
        "schema": {"type": "string"},
    },
    "x-millrace-route-reason": {
        "description": "Why it is that one, if the request left the choice.",
        "schema": {"type": "string"},
    },
}
_GENERATION_HEADERS: list[Schema] = [
    {
        "name": "Idempotency-Key",
        "in": "header",
        "description": "The same key and body attach to the answer that there is, for a day; the "
        "same key with another body is refused (409).",
        "schema": {"type": "string", "pattern": "^[!-~]{1,255}$"},
    },
    {
        "name": "Last-Event-ID",
        "in": "header",
        "description": "Go on with a stream behind this event of it. The body is the same as "
        "before, with stream: true.",
        "schema": {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,128}/[0-9]{1,9}(,[0-9]{1,9})*$"},
    },
]


@cache
def openapi_text() -> str:
    """The OpenAPI document, as it is checked in."""
    return _text(openapi_document())


@cache
def websocket_text() -> str:
    """The schema of the WebSocket's messages, as it is checked in."""
    return _text(websocket_schema())


def routes() -> list[Route]:
    """Both documents; whoever can connect may read them."""
    return [
        Route("/openapi.json", partial(_serve, openapi_text), methods=["GET"]),
        Route("/v1/ws/schema.json", partial(_serve, websocket_text), methods=["GET"]),
    ]


def openapi_document() -> dict[str, Any]:
    """The whole document, ready for JSON."""
    kinds: list[Any] = [ErrorBody, GivenMessage, GivenCall, GivenCallOutput]
    for one in OPERATIONS:
        for kind in (one.body, one.answer, one.event):
            if kind is not None and not isinstance(kind, dict) and kind not in kinds:
                kinds.append(kind)
    schemas, components = _components(kinds, REF)
    schema_of = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, Any] = {}
    for one in OPERATIONS:
        paths.setdefault(one.path, {})[one.method] = _operation(one, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Millrace",
            "version": "1.0.0",
            "description": _DESCRIPTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": components,
            "responses": {str(status): _error(status) for status in _ERRORS},
            "headers": {
                "x-request-id": _REQUEST_ID,
                "Retry-After": _RETRY_AFTER,
                **_RATE_LIMITS,
                **_ROUTED,
            },
            "securitySchemes": {
                "key": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "An API key, made by millrace keys create. A gateway on "
                    "loopback serves callers without one as well.",
                }
            },
        },
    }


def websocket_schema() -> dict[str, Any]:
    """The messages as JSON Schema: ``$defs`` has ClientMessage, ServerMessage and each of theirs;
    the whole accepts either."""
    kinds = [ClientMessage, ServerMessage]
    schemas, components = _components(kinds, _DEFINITION)
    unions = dict(zip(map(_NAMES.__getitem__, kinds), schemas, strict=True))
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"Messages of /v1/ws, subprotocol {SUBPROTOCOL}",
        "anyOf": [{"$ref": _DEFINITION.format(name=name)} for name in unions],
        "$defs": _without_discriminators(components | unions),
    }


def _components(kinds: list[Any], template: str) -> tuple[tuple[Schema, ...], dict[str, Schema]]:
    schemas, components = msgspec.json.schema_components(kinds, ref_template=template)
    return schemas, {name: refine(name, schema) for name, schema in components.items()}


def _operation(one: Operation, schema_of: dict[Any, Schema]) -> Schema:
    def schema(kind: Any) -> Schema:
        return kind if isinstance(kind, dict) else schema_of[kind]

    operation: Schema = {"operationId": one.name, "tags": [one.tag], "summary": one.summary}
    if one.description:
        operation["description"] = one.description
    if not one.is_open:
        operation["security"] = [{"key": []}, {}]
    parameters = _parameters(one)
    if parameters:
        operation["parameters"] = parameters
    if one.body is not None:
        media: Schema = {"schema": schema(one.body)}
        if one.example is not None:
            media["example"] = one.example
        operation["requestBody"] = {"required": True, "content": {one.body_type: media}}
    content: Schema = {one.answer_type: {"schema": schema(one.answer)}}
    if one.event is not None:
        # Before OpenAPI 3.2 a schema can tell of the whole stream only.
        content[_SSE] = {"x-event": schema(one.event)}
    headers = ["x-request-id"]
    if one.is_generation or one.tag == "embeddings":
        headers += _RATE_LIMITS
    if one.is_generation:
        headers += _ROUTED
    answer = {
        "description": _STREAMED if one.is_generation else "Done.",
        "headers": {name: {"$ref": f"#/components/headers/{name}"} for name in headers},
        "content": content,
    }
    operation["responses"] = {"200": answer}
    if one.path == "/healthz":
        operation["responses"]["503"] = {**answer, "description": "Not now."}
    statuses = set(one.errors) if one.is_open else {*one.errors, *_OF_ALL_CALLERS}
    for status in sorted(statuses):
        operation["responses"][str(status)] = {"$ref": f"#/components/responses/{status}"}
    return operation


def _parameters(one: Operation) -> list[Schema]:
    in_path = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in re.findall(r"\{(\w+)\}", one.path)
    ]
    in_query = [
        {"name": q.name, "in": "query", "description": q.description, "schema": q.schema}
        for q in one.query
    ]
    return [*in_path, *in_query, *(_GENERATION_HEADERS if one.is_generation else [])]


def _error(status: int) -> Schema:
    headers = ["x-request-id"]
    if status in {409, 429, 503}:
        headers.append("Retry-After")
    if status == 429:
        headers += _RATE_LIMITS
    return {
        "description": _ERRORS[status],
        "headers": {name: {"$ref": f"#/components/headers/{name}"} for name in headers},
        "content": {JSON: {"schema": {"$ref": REF.format(name="ErrorBody")}}},
    }


def _without_discriminators(node: Any) -> Any:
    """They are OpenAPI's; each message's own ``type`` says as much."""
    if isinstance(node, dict):
        return {
            key: _without_discriminators(value)
            for key, value in node.items()
            if key != "discriminator"
        }
    if isinstance(node, list):
        return [_without_discriminators(item) for item in node]
    return node


def _text(document: dict[str, Any]) -> str:
    raw = msgspec.json.encode(document, order="deterministic")
    return msgspec.json.format(raw, indent=2).decode() + "\n"


async def _serve(text: Any, _request: Request) -> Response:
    return Response(text(), media_type=JSON)


if __name__ == "__main__":
    (_DOCS / "openapi.json").write_text(openapi_text(), encoding="utf-8")
    (_DOCS / "websocket.schema.json").write_text(websocket_text(), encoding="utf-8")
