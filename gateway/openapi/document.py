"""Documents of the gateway's contracts, made from the schemas: OpenAPI 3.1 for HTTP, a JSON Schema
for the messages of the WebSocket.

``python -m millrace.gateway.openapi.document`` writes docs/openapi.json and
docs/websocket.schema.json anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, get_args

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from millrace.bus import asyncapi
from millrace.gateway.api.event_ids import EVENT_ID_PATTERN
from millrace.gateway.api.system import HEALTH_PATHS
from millrace.gateway.openapi.fields import refine
from millrace.gateway.openapi.operation import JSON, Media, Operation
from millrace.gateway.openapi.operations import BY_TAG, OPERATIONS
from millrace.gateway.openapi.portable import Components, Use
from millrace.gateway.transport.response_headers import HEADERS, RATE_LIMITS, ROUTED
from millrace.schemas.anthropic.answers import MessageEvent
from millrace.schemas.chat.tools import ChatTool
from millrace.schemas.json_schema import REF, Schema, document_text, pascal, without_discriminators
from millrace.schemas.openai import ErrorBody
from millrace.schemas.responses.events import ResponseEvent
from millrace.schemas.responses.items import GivenItem, Item
from millrace.schemas.responses.tools import ResponseTool
from millrace.schemas.websocket import SUBPROTOCOL, ClientMessage, ServerMessage

_DOCS = Path(__file__).resolve().parents[2] / "docs"
_SSE = "text/event-stream"
_DEFINITION = "#/$defs/{name}"
# Unions with a name of their own.
_NAMES = {
    ClientMessage: "ClientMessage",
    ServerMessage: "ServerMessage",
    Item: "Item",
    MessageEvent: "MessageEvent",
    ResponseEvent: "ResponseEvent",
}

_ASKED = Use(is_asked=True, is_answered=False)
_ANSWERED = Use(is_asked=False, is_answered=True)

_DESCRIPTION = f"""\
OpenAI's API and Anthropic's Messages API on a message bus. Unsupported fields are refused with \
an error that names them. Every error has a stable code and the shape of ErrorBody, or of \
MessagesError at and below /v1/messages.

The WebSocket at /v1/ws has the subprotocol {SUBPROTOCOL}. /v1/ws/schema.json describes its \
messages."""

_ERRORS = {
    400: "A field, a header or the body is invalid. param names it.",
    401: "The API key is missing or invalid.",
    403: "The key, the tier or the page's origin lacks permission.",
    404: "The object does not exist, or belongs to another tenant.",
    408: "The body did not arrive in time.",
    409: "The request conflicts with the current state.",
    413: "The body is too large. The message names its size and the limit.",
    415: "The content type of the body is not JSON.",
    429: "A limit is reached or the queue is full. The code tells which.",
    500: "The gateway or the engine failed.",
    503: "A store or the bus is unreachable, or the gateway shuts down. Nothing was accepted.",
    504: "The answer was not ready in time.",
}
_STREAMED = (
    "Done. With stream: true, server-sent events: the data of each has the schema of "
    "text/event-stream, or is [DONE] or an error's body."
)
_STRING: Schema = {"type": "string"}
_IDS = ("x-request-id", "x-millrace-request-id")
_GENERATION_HEADERS: list[Schema] = [
    {
        "name": "Idempotency-Key",
        "in": "header",
        "description": "A repeated request with the same key and body gets the same answer, for "
        "a day. The same key with another body is refused (409).",
        "schema": {"type": "string", "pattern": "^[!-~]{1,255}$"},
    },
    {
        "name": "Last-Event-ID",
        "in": "header",
        "description": "Resume a stream after this event. Send the same body as before, with "
        "stream: true.",
        "schema": {"type": "string", "pattern": f"^{EVENT_ID_PATTERN}$"},
    },
]


@cache
def openapi_text() -> str:
    """Return the OpenAPI document, as it is checked in."""
    return document_text(openapi_document())


@cache
def asyncapi_text() -> str:
    """Return the AsyncAPI document of the bus, as it is checked in."""
    return asyncapi.text()


@cache
def websocket_text() -> str:
    """Return the schema of the WebSocket's messages, as it is checked in."""
    return document_text(websocket_schema())


def routes() -> list[Route]:
    """Return the routes of the documents, which need no key."""
    return [
        Route("/openapi.json", partial(_serve, openapi_text), methods=["GET"]),
        Route("/asyncapi.json", partial(_serve, asyncapi_text), methods=["GET"]),
        Route("/v1/ws/schema.json", partial(_serve, websocket_text), methods=["GET"]),
    ]


def openapi_document() -> Schema:
    """Return the whole document, ready for JSON."""
    asked = [one.body for one in OPERATIONS]
    answered = [kind for one in OPERATIONS for kind in (one.answer, one.event, one.refused)]
    schema_of, components = _components(
        asked, answered, get_args(GivenItem), get_args(ChatTool), get_args(ResponseTool)
    )
    paths: dict[str, Any] = {}
    for tag, operations in BY_TAG.items():
        for one in operations:
            paths.setdefault(one.path, {})[one.method] = _operation(tag, one, schema_of, components)
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
            "schemas": components.schemas,
            "responses": {
                _error_name(refused, status): _error(status, schema_of[refused])
                for refused in dict.fromkeys(one.refused for one in OPERATIONS)
                for status in _ERRORS
            },
            "headers": HEADERS,
            "securitySchemes": {
                "key": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "An API key, made by millrace keys create. A gateway on "
                    "loopback serves callers without one as well.",
                },
                "headerKey": {
                    "type": "apiKey",
                    "in": "header",
                    "name": "x-api-key",
                    "description": "The same key, as clients of Anthropic's API send it.",
                },
            },
        },
    }


def websocket_schema() -> Schema:
    """Return the JSON Schema of the messages: ``$defs`` has ClientMessage, ServerMessage and their
    messages; the whole accepts either.
    """
    schema_of, components = _components([ClientMessage], [ServerMessage], get_args(ChatTool))
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"Messages of /v1/ws, subprotocol {SUBPROTOCOL}",
        "anyOf": [schema_of[kind] for kind in (ClientMessage, ServerMessage)],
        "$defs": without_discriminators(components.schemas),
    }
    text = msgspec.json.encode(schema).decode()
    text = text.replace(REF.format(name=""), _DEFINITION.format(name=""))
    return msgspec.json.decode(text, type=Schema)


def _components(
    asked: Iterable[Any], answered: Iterable[Any], *named: Sequence[Any]
) -> tuple[dict[Any, Schema], Components]:
    """Return the schema of each type that clients send or are answered, and the components that
    these refer to. ``named`` are the types that only ``refine`` refers to."""
    asked, answered = (
        [kind for kind in kinds if kind is not None and not isinstance(kind, Media)]
        for kinds in (asked, answered)
    )
    kinds = list(dict.fromkeys((*asked, *answered, *chain.from_iterable(named))))
    schemas, components = msgspec.json.schema_components(kinds, ref_template=REF)
    schema_of = dict(zip(kinds, schemas, strict=True))
    unions = {name: schema_of[kind] for kind, name in _NAMES.items() if kind in schema_of}
    schema_of |= {kind: {"$ref": REF.format(name=_NAMES[kind])} for kind in kinds if kind in _NAMES}
    refined = {name: refine(name, schema) for name, schema in (components | unions).items()}
    in_requests = _reachable([schema_of[kind] for kind in asked], refined)
    in_answers = _reachable([schema_of[kind] for kind in answered], refined)
    return schema_of, Components(refined, in_requests, in_answers)


def _reachable(node: Any, components: dict[str, Schema]) -> set[str]:
    """Return the names of the components that ``node`` refers to, directly or through others."""
    found: set[str] = set()
    left = [node]
    while left:
        here = left.pop()
        if isinstance(here, list):
            left += here
        elif isinstance(here, dict):
            left += here.values()
            name = str(here.get("$ref", "")).rpartition("/")[-1]
            if name and name not in found:
                found.add(name)
                left.append(components[name])
    return found


def _operation(
    tag: str, one: Operation, schema_of: dict[Any, Schema], components: Components
) -> Schema:

    def content_of(kind: Any, what: str, use: Use) -> dict[str, Schema]:
        """Return the content of a body of that kind, by media type."""
        if not isinstance(kind, Media):
            return {JSON: {"schema": schema_of[kind]}}
        title = pascal(one.name) + what
        return {kind.type: {"schema": components.portable(kind.schema, title, use)}}

    operation: Schema = {"operationId": one.name, "tags": [tag], "summary": one.summary}
    if one.description:
        operation["description"] = one.description
    operation["security"] = [] if one.is_open else [{"key": []}, {"headerKey": []}, {}]
    parameters = _parameters(one, components)
    if parameters:
        operation["parameters"] = parameters
    if one.body is not None:
        content = content_of(one.body, "Form", _ASKED)
        if one.example is not None:
            content[JSON]["example"] = one.example
        operation["requestBody"] = {"required": True, "content": content}
    content = content_of(one.answer, "Result", _ANSWERED)
    if one.event is not None:
        content[_SSE] = {"schema": schema_of[one.event]}
    headers = list(_IDS)
    if tag in {"generation", "embeddings"}:
        headers += RATE_LIMITS
    if tag == "generation":
        headers += ROUTED
    answer = {
        "description": "Done." if one.event is None else _STREAMED,
        "headers": _references("headers", headers),
        "content": content,
    }
    operation["responses"] = {"200": answer, **_errors(one)}
    if one.path in HEALTH_PATHS:
        operation["responses"]["503"] = {**answer, "description": "Not now."}
    return operation


def _references(section: str, names: Iterable[str]) -> dict[str, Schema]:
    return {name: {"$ref": f"#/components/{section}/{name}"} for name in names}


def _parameters(one: Operation, components: Components) -> list[Schema]:
    in_path = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in one.path_parameters
    ]
    in_query = [
        {
            "name": q.name,
            "in": "query",
            "description": q.description,
            "schema": components.portable(q.schema, pascal(one.name) + pascal(q.name), _ANSWERED),
        }
        for q in one.query
    ]
    return [*in_path, *in_query, *(_GENERATION_HEADERS if one.is_generation else [])]


def _errors(one: Operation) -> Schema:
    names = {str(status): _error_name(one.refused, status) for status in one.errors}
    return {status: {"$ref": f"#/components/responses/{name}"} for status, name in names.items()}


def _error_name(refused: Any, status: int) -> str:
    """Return the component name of an error response. Responses of the common shape are named by
    their status alone.
    """
    return str(status) if refused is ErrorBody else f"{refused.__name__}{status}"


def _error(status: int, schema: Schema) -> Schema:
    headers = list(_IDS)
    if status in {409, 429, 503}:
        headers.append("Retry-After")
    if status not in {408, 500, 504}:
        headers.append("x-should-retry")
    if status == 429:
        headers += RATE_LIMITS
    return {
        "description": _ERRORS[status],
        "headers": _references("headers", headers),
        "content": {JSON: {"schema": schema}},
    }


async def _serve(text: Any, _request: Request) -> Response:
    return Response(text(), media_type=JSON)


if __name__ == "__main__":
    (_DOCS / "openapi.json").write_text(openapi_text(), encoding="utf-8")
    (_DOCS / "websocket.schema.json").write_text(websocket_text(), encoding="utf-8")
