"""Checked-in OpenAPI contracts, against the schemas and the served routes."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from jsonschema import Draft202012Validator
from starlette.routing import Mount, Route
from websockets.asyncio.client import connect

from millrace.gateway import app
from millrace.gateway.api.pooled.embeddings import CLASSIFY_ROUTE
from millrace.gateway.openapi import document as openapi
from millrace.gateway.openapi.fields import FIELDS, SAMPLING
from millrace.gateway.openapi.operations import OPERATIONS
from millrace.registry.requests.decoding import decode
from millrace.registry.requests.parsing import parse_chat, parse_completion, parse_generate
from millrace.schemas.chat.messages import MESSAGE_OF_ROLE
from millrace.schemas.errors import ParameterError
from millrace.schemas.openai import ChatCompletionRequest, CompletionRequest
from millrace.schemas.websocket import SUBPROTOCOL, Generate
from tests.support.running_gateway import MODEL, RunningGateway

_DOCS = Path(__file__).parents[2] / "docs"
_GOLDEN = Path(__file__).parent / "golden"
_PAGES = {"/", "/ops", "/v1/ws"}  # pages, and what docs/asyncapi.json describes
_CHAT = msgspec.json.Decoder(ChatCompletionRequest)

Json = dict[str, Any]


def validator(component: str) -> Draft202012Validator:
    document = openapi.openapi_document()
    return Draft202012Validator(
        {"$ref": f"#/components/schemas/{component}", "components": document["components"]}
    )


def message_validator(name: str) -> Draft202012Validator:
    return Draft202012Validator(
        {"$ref": f"#/$defs/{name}", "$defs": openapi.websocket_schema()["$defs"]}
    )


def references(node: object) -> set[str]:
    if isinstance(node, dict):
        found = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return found.union(*map(references, node.values()))
    if isinstance(node, list):
        return set().union(*map(references, node))
    return set()


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("openapi.json", openapi.openapi_text),
        ("websocket.schema.json", openapi.websocket_text),
    ],
)
def test_the_openapi_documents_are_not_stale(name: str, made: Any) -> None:
    stale = "run: python -m millrace.gateway.openapi.document"
    assert (_DOCS / name).read_text(encoding="utf-8") == made(), stale


@pytest.mark.parametrize("made", [openapi.openapi_document, openapi.websocket_schema])
def test_every_reference_leads_somewhere(made: Any) -> None:
    document = made()
    for reference in references(document):
        node: Any = document
        for key in reference.removeprefix("#/").split("/"):
            node = node[key]


def test_every_schema_is_a_valid_json_schema() -> None:
    for schema in openapi.openapi_document()["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
    Draft202012Validator.check_schema(openapi.websocket_schema())


def test_every_refined_field_is_there() -> None:
    components = openapi.openapi_document()["components"]["schemas"]
    components |= openapi.websocket_schema()["$defs"]
    for component, fields in FIELDS.items():
        assert fields.keys() <= components[component]["properties"].keys(), component


async def test_every_route_is_in_it_and_nothing_else(front: RunningGateway) -> None:
    served = {("post", endpoint.route) for endpoint in app.token_endpoints(front.gateway)}
    for route in app._starlette(front.gateway).routes:
        if isinstance(route, Mount):
            continue
        assert isinstance(route, Route)
        methods = (route.methods or set()) - {"HEAD"}
        path = re.sub(r":\w+\}", "}", route.path)
        served.update((method.lower(), path) for method in methods if path not in _PAGES)
    documented = {
        (method, path)
        for path, methods in openapi.openapi_document()["paths"].items()
        for method in methods
    }
    assert documented == served


async def test_the_documents_are_served(http: httpx.AsyncClient) -> None:
    for path, text in (
        ("/openapi.json", openapi.openapi_text()),
        ("/asyncapi.json", (_DOCS / "asyncapi.json").read_text(encoding="utf-8")),
        ("/v1/ws/schema.json", openapi.websocket_text()),
    ):
        answer = await http.get(path)
        assert (answer.status_code, answer.text) == (200, text)
        assert answer.headers["content-type"] == "application/json"


def test_operations_have_names_of_their_own() -> None:
    names = [one.name for one in OPERATIONS]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", SAMPLING)
def test_ranges_are_those_of_sampling(name: str) -> None:
    """Values at the bounds of the document are accepted, and values beyond them are refused."""
    bounds = SAMPLING[name]

    def parse(value: float) -> None:
        if name == "length_penalty":  # goes only with what goes over no WebSocket
            asked: Json = {"use_beam_search": True, name: value}
            parse_completion(CompletionRequest(model=MODEL, prompt="x", **asked))
        else:
            parse_generate(Generate(id="a", model=MODEL, prompt="x", **{name: value}))  # type: ignore[arg-type]

    for key, beyond in (("minimum", -0.001), ("maximum", 0.001)):
        if key in bounds:
            parse(bounds[key])
            with pytest.raises(ParameterError):
                parse(bounds[key] + beyond)
    if "exclusiveMinimum" in bounds:
        with pytest.raises(ParameterError):
            parse(bounds["exclusiveMinimum"])


def test_tiers_are_those_that_are_taken() -> None:
    for tier in FIELDS["Generate"]["service_tier"]["enum"]:
        parse_generate(Generate(id="a", model=MODEL, prompt="x", service_tier=tier))


def test_roles_are_those_that_are_taken() -> None:
    described = validator("ChatCompletionRequest")
    for role in (*MESSAGE_OF_ROLE, "function"):
        turn = {"role": role, "content": "x"} | ({"tool_call_id": "c"} if role == "tool" else {})
        body = {"model": MODEL, "messages": [turn]}
        try:
            parse_chat(decode(_CHAT, json.dumps(body)))
        except ParameterError:
            assert role == "function"
        assert described.is_valid(body) == (role != "function")


@pytest.mark.parametrize(
    ("transcript", "component"),
    [
        ("chat.sse", "ChatCompletionChunk"),
        ("chat_usage.sse", "ChatCompletionChunk"),
        ("completion.sse", "CompletionChunk"),
    ],
)
def test_streams_are_what_it_describes(transcript: str, component: str) -> None:
    described = validator(component)
    lines = (_GOLDEN / transcript).read_text(encoding="utf-8").splitlines()
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
    assert len(events) > 2
    for event in events:
        described.validate(json.loads(event))


async def test_answers_are_what_it_describes(http: httpx.AsyncClient) -> None:
    for path, component in (
        ("/healthz", "Health"),
        ("/v1/models", "ModelList"),
        ("/v1/tools", "ServerToolList"),
        ("/absent", "ErrorBody"),
    ):
        validator(component).validate((await http.get(path)).json())
    for operation in OPERATIONS:
        if "model" not in (operation.example or {}):
            continue  # it is about what is kept, which there is none of here
        if operation.path == CLASSIFY_ROUTE:
            continue  # the model here has no labels
        body = operation.example | {"model": MODEL}
        answer = await http.post(operation.path, json=body)
        assert answer.status_code == 200, answer.text
        validator(operation.answer.__name__).validate(answer.json())


async def test_responses_are_streamed_as_it_describes(http: httpx.AsyncClient) -> None:
    described = validator("ResponsesRequest")
    body = {"model": MODEL, "input": "hi", "stream": True}
    described.validate(body)
    text = (await http.post("/v1/responses", json=body)).text
    events = [line.removeprefix("data: ") for line in text.splitlines() if line[:6] == "data: "]
    event_schema = openapi.openapi_document()["paths"]["/v1/responses"]["post"]["responses"]
    schema = event_schema["200"]["content"]["text/event-stream"]["schema"]
    components = openapi.openapi_document()["components"]
    events_described = Draft202012Validator({**schema, "components": components})
    assert len(events) > 5
    for event in events:
        events_described.validate(json.loads(event))


async def test_what_goes_over_a_socket_is_what_it_describes(front: RunningGateway) -> None:
    from_client, from_server = map(message_validator, ("ClientMessage", "ServerMessage"))
    asked: list[Json] = [
        {"type": "ping"},
        {"type": "cancel", "id": "z"},
        {"type": "resume", "id": "b", "request_id": "absent", "next_index": 3},
        {"type": "generate", "id": "a", "model": MODEL, "prompt": "hi"},
    ]
    seen = []
    async with connect(front.ws_url, subprotocols=[SUBPROTOCOL]) as socket:  # type: ignore[list-item]
        for message in asked:
            from_client.validate(message)
            await socket.send(json.dumps(message))
        async with asyncio.timeout(5):
            while "done" not in seen:
                answer = json.loads(await socket.recv())
                from_server.validate(answer)
                seen.append(answer["type"])
    assert {"pong", "error", "accepted", "started", "delta", "done"} <= set(seen)


@pytest.mark.parametrize(
    "message",
    [
        {"type": "generate", "model": MODEL, "prompt": "no id"},
        {"type": "generate", "id": "a", "model": MODEL, "colour": "red"},
        {"type": "generate", "id": "a", "model": MODEL, "prompt": "x", "temperature": 3},
        {"type": "resume", "id": "a", "request_id": 7},
        {"type": "cancel"},
        {"type": "sing", "id": "a"},
    ],
)
def test_the_schema_refuses_what_the_socket_refuses(message: Json) -> None:
    assert not message_validator("ClientMessage").is_valid(message)
