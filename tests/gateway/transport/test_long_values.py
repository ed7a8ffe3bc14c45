"""Values that clients send are shortened wherever they are shown: in errors, headers and logs."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis
from websockets.asyncio.client import connect

from millrace.schemas.config import GatewayConfig, RedisConfig
from millrace.schemas.errors import SHOWN_CHARACTERS
from millrace.schemas.websocket import SUBPROTOCOL
from tests.support.running_gateway import MODEL, RunningGateway, running_gateway
from tests.support.servers import RedisServer

_WORD = "x" * 3_000
_WORDS = "several words and " * 200
_TOO_LONG = (_WORD[: SHOWN_CHARACTERS + 1], _WORDS[: SHOWN_CHARACTERS + 1])
_MAX_ANSWER_BYTES = 1_500
_TOOL = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}
_CALL = {"id": "call-1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
_MESSAGES = [
    {"role": "user", "content": [{"type": "text", "text": "hello"}]},
    {"role": "assistant", "content": None, "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "call-1", "content": "done"},
]
_SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "format": "date"}}}

Json = dict[str, Any]

_BODIES: dict[str, Json] = {
    "/v1/chat/completions": {
        "model": MODEL,
        "messages": _MESSAGES,
        "tools": [{"type": "function", "function": _TOOL}],
        "tool_choice": {"type": "function", "function": {"name": "look"}},
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": _SCHEMA},
        },
        "stop": ["a"],
        "service_tier": "default",
        "metadata": {"a": "b"},
        "chat_template_kwargs": {"enable_thinking": True},
        "reasoning_effort": "low",
        "session": "s",
        "server_tools": ["a"],
        "logit_bias": {"1": 1},
        "stream_options": {"include_usage": True},
        "lora": "a",
        "guided_regex": "a",
    },
    "/v1/completions": {"model": MODEL, "prompt": "a", "suffix": "a", "user": "a", "stop": "b"},
    "/v1/responses": {
        "model": MODEL,
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "done"},
        ],
        "tools": [{"type": "function", **_TOOL}],
        "tool_choice": {"type": "function", "name": "look"},
        "text": {"format": {"type": "json_schema", "name": "a", "schema": _SCHEMA}},
        "previous_response_id": "resp-1",
        "conversation": "conv-1",
        "include": ["a"],
        "truncation": "auto",
        "reasoning": {"effort": "low", "summary": "auto"},
        "metadata": {"a": "b"},
    },
    "/v1/messages": {
        "model": MODEL,
        "max_tokens": 5,
        "system": [{"type": "text", "text": "a"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hello"}]},
            {"role": "assistant", "content": [
                {"type": "tool_use", "id": "call-1", "name": "look", "input": {}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "call-1", "content": "done"}]},
        ],
        "tools": [{"name": "look", "description": "a", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "tool", "name": "look"},
        "thinking": {"type": "disabled"},
        "metadata": {"user_id": "a"},
    },
    "/v1/embeddings": {"model": MODEL, "input": ["a"], "encoding_format": "float", "user": "a"},
    "/v1/rerank": {"model": MODEL, "query": "a", "documents": ["a"]},
    "/v1/score": {"model": MODEL, "text_1": "a", "text_2": "b"},
    "/v1/tokenize": {"model": MODEL, "prompt": "a"},
    "/v1/detokenize": {"model": MODEL, "tokens": [1]},
    "/v1/batches": {"input_file_id": "file-1", "endpoint": "/v1/completions",
                    "completion_window": "24h", "metadata": {"a": "b"}},
    "/v1/conversations": {"items": [{"type": "message", "role": "user", "content": "a"}],
                          "metadata": {"a": "b"}},
    "/v1/chats/chat-1": {"title": "a", "chat": {"a": "b"}},
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "/a", "base_model_name": MODEL},
    "/v1/unload_lora_adapter": {"lora_name": "a"},
    "/v1/rollouts": {"model": MODEL, "candidate": "b", "abort_if": "error_rate>0.1"},
}  # fmt: skip


@pytest.fixture
async def front(redis_server: RedisServer) -> AsyncIterator[RunningGateway]:
    client = Redis.from_url(redis_server.url)
    await client.flushall()
    await client.aclose()
    redis = RedisConfig(url=f"{redis_server.url}/0")
    async with running_gateway(GatewayConfig(), redis=redis) as running:
        yield running


def variants(value: Any, given: str) -> Iterator[Any]:
    """Copies of a JSON value, each with a long text in one place: as a value, or as a name."""
    if isinstance(value, dict):
        yield {**copy.deepcopy(value), given: 1}
        for name, inner in value.items():
            for variant in variants(inner, given):
                yield {**value, name: variant}
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            for variant in variants(inner, given):
                yield [*value[:place], variant, *value[place + 1 :]]
    yield given


def assert_short(text: str, where: object) -> None:
    for long in _TOO_LONG:
        assert long not in text, f"{str(where)[:2_000]}: {text[:1_000]}"


def assert_short_logs(caplog: pytest.LogCaptureFixture) -> None:
    for record in caplog.records:
        if record.name.startswith("millrace"):
            assert_short(str(vars(record)), record.getMessage())


@pytest.mark.parametrize("path", _BODIES)
async def test_refusals_show_the_beginning_of_a_value(
    front: RunningGateway, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    num_refused = 0
    async with httpx.AsyncClient(base_url=front.url, timeout=20.0) as http:
        for given in (_WORD, _WORDS):
            for body in variants(_BODIES[path], given):
                answer = await http.post(path, json=body)
                assert answer.status_code < 500, (answer.text, str(body)[:500])
                if answer.status_code < 400:
                    continue
                num_refused += 1
                assert len(answer.content) <= _MAX_ANSWER_BYTES, answer.text[:2_000]
                assert_short(answer.text, body)
                assert_short(str(answer.headers), body)
    assert num_refused > len(_BODIES[path])
    assert_short_logs(caplog)


_PATHS = (
    "/{}",
    "/v1/models/{}",
    "/v1/files/{}",
    "/v1/files/{}/content",
    "/v1/batches/{}",
    "/v1/responses/{}",
    "/v1/conversations/{}",
    "/v1/chats/{}",
    "/v1/sessions/{}",
    "/v1/rollouts/{}",
    "/ops/api/{}",
    "/ops/{}",
    "/static/{}",
    "/v1/files?order={}",
    "/v1/files?{}=1",
    "/v1/files?limit={}",
    "/v1/files?after={}",
    "/v1/batches?limit={}",
    "/v1/batches?{}=1",
    "/v1/chats?{}=1",
    "/v1/responses/resp-1?{}=1",
    "/v1/responses/resp-1/input_items?order={}",
    "/ops/api/requests_page?{}=1",
    "/ops/api/requests_page?from_s={}",
)
_HEADERS = (
    "authorization",
    "x-api-key",
    "accept",
    "content-type",
    "content-encoding",
    "cookie",
    "expect",
    "host",
    "idempotency-key",
    "last-event-id",
    "origin",
    "traceparent",
    "x-forwarded-for",
    "x-request-id",
    "anthropic-version",
)


async def test_paths_and_headers_are_shown_by_their_beginning(
    front: RunningGateway, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with httpx.AsyncClient(base_url=front.url, timeout=20.0) as http:
        for given in (_WORD, _WORDS.strip()):
            for path in _PATHS:
                for method in ("GET", "DELETE", given[:300].replace(" ", "")):
                    answer = await http.request(method, path.format(given))
                    assert_short(answer.text + str(answer.headers), path)
                    assert len(answer.content) <= _MAX_ANSWER_BYTES, answer.text[:2_000]
            for name in _HEADERS:
                for path in ("/v1/completions", "/v1/embeddings", "/v1/files", "/v1/messages"):
                    headers = {"content-type": "application/json", name: given}
                    body = json.dumps({"model": MODEL, "prompt": "a", "input": "a"})
                    answer = await http.post(path, content=body, headers=headers)
                    if answer.status_code >= 400:
                        assert_short(answer.text + str(answer.headers), (path, name))
    assert_short_logs(caplog)


async def test_forms_are_shown_by_their_beginning(front: RunningGateway) -> None:
    async with httpx.AsyncClient(base_url=front.url, timeout=20.0) as http:
        for given in (_WORD, _WORDS):
            for files, data in (
                ({"file": (given, b"{}")}, {"purpose": "batch"}),
                ({"file": ("a", b"{}")}, {"purpose": given}),
                ({"file": ("a", b"{}")}, {given: "batch"}),
                ({given: ("a", b"{}")}, {"purpose": "batch"}),
            ):
                answer = await http.post("/v1/files", files=files, data=data)
                assert answer.status_code == 400
                assert_short(answer.text, data)


async def test_a_socket_shows_values_by_their_beginning(
    front: RunningGateway, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    bodies: list[Json] = [
        {"type": "generate", "id": "a", **_BODIES["/v1/chat/completions"]},
        {"type": "resume", "id": "a", "request_id": "b", "index": 1},
        {"type": "cancel", "id": "a"},
        {"type": "authenticate", "token": "mr-a-b"},
    ]
    num_refused = 0
    async with connect(front.ws_url, subprotocols=[SUBPROTOCOL]) as socket:  # type: ignore[list-item]
        for given in (_WORD, _WORDS):
            for message in (one for body in bodies for one in variants(body, given)):
                if isinstance(message, dict) and message.get("type") == "authenticate":
                    continue
                await socket.send(json.dumps(message))
                await socket.send('{"type":"ping"}')
                while (answer := str(await socket.recv())) != '{"type":"pong"}':
                    if '"type":"error"' in answer:
                        num_refused += 1
                        assert_short(answer, message)
                        assert len(answer) <= _MAX_ANSWER_BYTES
    assert num_refused > 20
    assert_short_logs(caplog)


async def test_megabytes_are_shown_by_their_beginning(front: RunningGateway) -> None:
    given = "y" * 3_000_000
    async with httpx.AsyncClient(base_url=front.url, timeout=20.0) as http:
        for body in (
            {"model": given, "messages": _MESSAGES},
            {"model": MODEL, "messages": _MESSAGES, given: 1},
            {"model": MODEL, "messages": _MESSAGES, "response_format": {"type": given}},
            {"model": MODEL, "messages": _MESSAGES, "tools": [{"type": given}]},
        ):
            for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"):
                answer = await http.post(path, json=body)
                assert answer.status_code in (400, 404)
                assert len(answer.content) <= _MAX_ANSWER_BYTES


async def test_a_page_s_origin_and_headers_are_not_told_back_at_any_length() -> None:
    async with (
        running_gateway(GatewayConfig(allowed_origins=("*",))) as front,
        httpx.AsyncClient(base_url=front.url) as http,
    ):
        page = {"origin": "https://app.example", "access-control-request-method": "POST"}
        for names, shown in (("x-a, authorization", "x-a, authorization"), (_WORD, "")):
            headers = {**page, "access-control-request-headers": names}
            answer = await http.options("/v1/models", headers=headers)
            assert (answer.status_code, answer.headers["access-control-allow-headers"]) == (
                204,
                shown,
            )
        answer = await http.get("/v1/models", headers={"origin": f"https://{_WORD}"})
        assert answer.status_code == 403
        assert_short(answer.text + str(answer.headers), "origin")
