"""Random requests inside and outside the OpenAPI document, over a real socket."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, settings
from redis import Redis
from schemathesis import Case, CheckContext, GenerationMode, Response
from schemathesis.checks import not_a_server_error
from schemathesis.config import SchemathesisConfig
from schemathesis.core.result import Ok
from schemathesis.pytest.lazy import get_all_tests
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from millrace.bus.tenancy.tenants import TenantStore
from millrace.gateway.openapi.document import openapi_document
from millrace.runtime.redis.link import RedisLink
from millrace.schemas.config import RedisConfig
from millrace.schemas.control import TelemetryAnswer, TelemetryQuery
from millrace.schemas.openai import ErrorBody
from tests.support.running_gateway import MODEL, RunningGateway, running_gateway
from tests.support.servers import RedisServer
from tests.support.waiting import eventually

_START_TIMEOUT_S = 20.0
_ANSWER_TIMEOUT_S = 10.0
_KEPT = "KEPT"  # stands for the id of something that is there
_KEY = "Idempotency-Key"
_NUMBERS = itertools.count()
# About 200 drawn examples in all.
_FEW: dict[str, Any] = {
    "generation": {"max-examples": 3, "deterministic": True, "no-shrink": True},
    "phases": {"coverage": {"enabled": False}, "examples": {"enabled": False}},
}
# Drawn examples, the document's own, and the bounds of each schema.
_MANY: dict[str, Any] = {
    "generation": {"max-examples": 8, "deterministic": True, "no-shrink": True},
    "phases": {"coverage": {"unexpected-methods": ["get", "delete"]}},
}

Json = dict[str, Any]


def _reachable() -> Json:
    """Return the document with names of existing objects, which chance would not find.

    The header that has most requests refused is removed.
    """
    document = copy.deepcopy(openapi_document())
    for component in document["components"]["schemas"].values():
        if "model" in component.get("properties", {}):
            component["properties"]["model"] = {"enum": [MODEL]}
    for operations in document["paths"].values():
        for operation in operations.values():
            parameters = operation.get("parameters", [])
            parameters[:] = [one for one in parameters if one["name"] != "Last-Event-ID"]
            for one in parameters:
                if one["in"] == "path":
                    one["schema"] = {"anyOf": [{"enum": [_KEPT]}, one["schema"]]}
            # The schema of a stream is that of each event's data. Schemathesis takes it for that of
            # the event's fields. tests/gateway/test_openapi.py holds streams to it.
            operation["responses"]["200"]["content"].get("text/event-stream", {}).clear()
            content = operation.get("requestBody", {}).get("content", {})
            for media in content.values():
                if "model" in media.get("example", ()):
                    media["example"]["model"] = MODEL
    return document


class Served:
    """A gateway in a thread of its own, and what it keeps, by the name of the path's parameter."""

    def __init__(self, redis: RedisConfig) -> None:
        self._redis = redis
        self._up = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=[self._serve()])
        self.front: RunningGateway | None = None
        self.with_key: dict[str, str] = {}  # headers, for endpoints that need a key

    def start(self) -> None:
        self._thread.start()
        assert self._up.wait(_START_TIMEOUT_S), "the gateway did not start"

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()
        self._loop.close()

    @property
    def url(self) -> str:
        assert self.front is not None
        return self.front.url

    @property
    def num_open(self) -> int:
        """Streams and answers that the gateway holds."""
        return asyncio.run_coroutine_threadsafe(self._num_open(), self._loop).result()

    async def _num_open(self) -> int:
        assert self.front is not None
        gateway = self.front.gateway
        return len(list(gateway.streams)) + len(gateway.responses.all())

    async def _serve(self) -> None:
        link = RedisLink(self._redis)
        _, key = await TenantStore(link).create_key("acme", 0)
        await link.close()
        self.with_key = {"authorization": f"Bearer {key}"}
        async with running_gateway(redis=self._redis) as self.front:
            await self.front.worker.bus.control.serve_telemetry(_rows)
            self._up.set()
            await self._over.wait()


async def _rows(query: TelemetryQuery) -> TelemetryAnswer:
    if query.name != _KEPT:
        return TelemetryAnswer(error=f"unknown query {query.name!r}", code="not_found")
    return TelemetryAnswer(rows_json=b'[{"rate":1.5}]')


@pytest.fixture(scope="module")
def served(redis_server: RedisServer) -> Iterator[Served]:
    url = f"{redis_server.url}/0"
    with Redis.from_url(url) as redis:
        redis.flushall()  # its requests belong to the bus of another test
    made = Served(RedisConfig(url=url))
    made.start()
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    """Connections are used again, which also shows an answer that does not end where it says. No
    proxy and no password is looked for before each request."""
    with requests.Session() as made:
        made.trust_env = False
        yield made


@pytest.fixture
def kept(served: Served) -> Iterator[dict[str, str]]:
    """Ids of one of everything, made anew for each operation. After it a good request works, and
    nothing is left open."""
    turn = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "session_id": "kept"}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": turn}
    with httpx.Client(base_url=served.url, timeout=_ANSWER_TIMEOUT_S) as http:
        http.post("/v1/chat/completions", json=turn).raise_for_status()
        response = http.post("/v1/responses", json={"model": MODEL, "input": "hi"}).json()
        upload = {"file": ("a.jsonl", json.dumps(line).encode())}
        file = http.post("/v1/files", files=upload, data={"purpose": "batch"}).json()
        order = {
            "input_file_id": file["id"],
            "endpoint": line["url"],
            "completion_window": "24h",
        }
        batch = http.post("/v1/batches", json=order).json()
        begun = {"items": [{"type": "message", "role": "user", "content": "hi"}]}
        conversation = http.post("/v1/conversations", json=begun).json()
        chat = {"revision": 0, "title": "", "document": {}}
        http.post("/v1/chats/kept", json=chat, headers=served.with_key)
        [item] = http.get(f"/v1/conversations/{conversation['id']}/items").json()["data"]
    yield {
        "session_id": "kept",
        "chat_id": "kept",
        "response_id": response["id"],
        "file_id": file["id"],
        "batch_id": batch["id"],
        "conversation_id": conversation["id"],
        "item_id": item["id"],
        "name": MODEL,
        "model": MODEL,
        "query": _KEPT,
    }
    with httpx.Client(base_url=served.url, timeout=_ANSWER_TIMEOUT_S) as http:
        answer = http.post("/v1/chat/completions", json=turn).json()
    assert answer["choices"][0]["message"]["content"] == "hi"
    asyncio.run(eventually(lambda: served.num_open == 0, what="all streams closed"))


def says_what_is_wrong(_context: CheckContext, response: Response, _case: Case[Any]) -> None:
    """Every refusal has OpenAI's shape, with a stable code and a sentence."""
    if response.status_code < 400:
        return
    error = msgspec.json.decode(response.content, type=ErrorBody).error
    assert error.code
    assert error.message
    assert error.type
    assert "x-request-id" in response.headers


def _schema(config: Json) -> Any:
    return schemathesis.openapi.from_dict(_reachable(), config=SchemathesisConfig.from_dict(config))


_FEW_EXAMPLES = _schema(_FEW)
_MANY_EXAMPLES = _schema(_MANY)
# Not by the schema's own ``parametrize``: that makes the cases when tests are collected, which each
# process of a run does, and names all operations' tests alike, of which xdist runs one.
_EACH_OPERATION = pytest.mark.parametrize(
    ("method", "path"),
    [
        pytest.param(method, path, id=f"{method.upper()} {path}")
        for path, methods in _FEW_EXAMPLES.items()
        for method in methods
    ],
)


@_EACH_OPERATION
def test_random_requests_get_documented_answers(
    method: str, path: str, served: Served, session: requests.Session, kept: dict[str, str]
) -> None:
    _check(_FEW_EXAMPLES, method, path, served=served, session=session, kept=kept)


@pytest.mark.slow(reason="eight drawn examples and every bound; the test above draws the first 200")
@_EACH_OPERATION
def test_requests_at_every_bound_get_documented_answers(
    method: str, path: str, served: Served, session: requests.Session, kept: dict[str, str]
) -> None:
    _check(_MANY_EXAMPLES, method, path, served=served, session=session, kept=kept)


def _check(schema: Any, method: str, path: str, **fixtures: Any) -> None:
    """Send the examples of one operation."""
    only = schema.include(method=method, path=path)
    [made] = get_all_tests(schema=only, test_func=_keeps_word, settings=None, given_kwargs=None)
    assert isinstance(made, Ok), made
    _operation, test = made.ok()
    test(**fixtures)


@settings(suppress_health_check=list(HealthCheck), deadline=None)
def _keeps_word(
    case: Case[Any], served: Served, session: requests.Session, kept: dict[str, str]
) -> None:
    for name, value in case.path_parameters.items():
        # As text: any other value with a "#" in it would lead to another path.
        case.path_parameters[name] = kept[name] if value == _KEPT else str(value)
    assert case.meta is not None
    if case.meta.generation.mode is GenerationMode.POSITIVE and _KEY in case.headers:
        # The generator repeats itself, and a key is for one request.
        case.headers[_KEY] = f"key-{next(_NUMBERS)}"
    if case.path.startswith("/v1/chats"):
        case.headers.update(served.with_key)
    case.call_and_validate(
        base_url=served.url,
        session=session,
        timeout=_ANSWER_TIMEOUT_S,
        checks=[
            not_a_server_error,
            status_code_conformance,
            content_type_conformance,
            response_headers_conformance,
            response_schema_conformance,
            negative_data_rejection,
            says_what_is_wrong,
        ],
    )
