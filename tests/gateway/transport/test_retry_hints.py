"""``x-should-retry`` ends the retries of SDKs where no retry helps, at every entrance."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import httpx
import openai
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from millrace.gateway.errors import Refusal
from millrace.schemas.config import GatewayConfig, RedisConfig
from millrace.schemas.control import QueueStatus
from tests.gateway.doors import DOORS
from tests.support.running_gateway import MODEL, RunningGateway, running_gateway
from tests.support.servers import RedisServer
from tests.support.waiting import eventually

_HELLO: Any = [{"role": "user", "content": "Hello there."}]


async def _quick(call: Awaitable[object], error: type[Exception]) -> None:
    """The call fails within a second."""
    begun_s = time.monotonic()
    with pytest.raises(error):
        await call
    assert time.monotonic() - begun_s < 1.0


async def test_a_wrong_key_ends_an_sdk_at_once(redis_server: RedisServer) -> None:
    config = GatewayConfig(auth="required")
    async with (
        running_gateway(config, redis=RedisConfig(url=redis_server.url)) as front,
        openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key="mr-none") as theirs,
        anthropic.AsyncAnthropic(base_url=front.url, api_key="mr-none") as others,
        httpx.AsyncClient(base_url=front.url, timeout=10) as http,
    ):
        refused, refused_here = openai.AuthenticationError, anthropic.AuthenticationError
        await _quick(theirs.chat.completions.create(model=MODEL, messages=_HELLO), refused)
        await _quick(theirs.responses.create(model=MODEL, input="a"), refused)
        await _quick(theirs.models.retrieve(MODEL), refused)
        ask = {"model": MODEL, "messages": _HELLO}
        await _quick(others.messages.create(**ask, max_tokens=9), refused_here)
        await _quick(others.messages.count_tokens(**ask), refused_here)
        for path, body in DOORS.items():
            answer = await http.post(path, json={"model": MODEL, **body})
            assert (answer.status_code, answer.headers["x-should-retry"]) == (401, "false"), path
        with pytest.raises(InvalidStatus) as handshake:
            async with connect(front.ws_url, additional_headers={"x-api-key": "mr-none"}):
                pass
        assert handshake.value.response.headers["x-should-retry"] == "false"


_Sent = Callable[[httpx.AsyncClient], Awaitable[httpx.Response]]


@pytest.mark.parametrize(
    ("status", "sent"),
    [
        (404, lambda http: http.post("/v1/chat/completion", json={})),
        (404, lambda http: http.get("/v1/models/none")),
        (
            404,
            lambda http: http.post(
                "/v1/messages", json={"model": "no", "max_tokens": 1, "messages": _HELLO}
            ),
        ),
        (405, lambda http: http.get("/v1/chat/completions")),
        (405, lambda http: http.delete("/v1/models")),
        (400, lambda http: http.post("/v1/chat/completions", content=b"{")),
        (400, lambda http: http.post("/v1/messages", json={"model": MODEL})),
        (
            415,
            lambda http: http.post("/v1/embeddings", content=b"", headers={"content-type": "a/b"}),
        ),
        (413, lambda http: http.post("/v1/responses", content=b"x" * 3_000)),
        (413, lambda http: http.post("/v1/tokenize", content=b"x" * 3_000)),
        (426, lambda http: http.get("/v1/ws")),
        (403, lambda http: http.get("/v1/models", headers={"origin": "https://a.example"})),
        (431, lambda http: http.get("/v1/models", headers={"x-a": "a" * 200_000})),
    ],
)
async def test_what_a_retry_does_not_mend(status: int, sent: _Sent) -> None:
    async with (
        running_gateway(GatewayConfig(max_body_bytes=2_000)) as front,
        httpx.AsyncClient(base_url=front.url, timeout=10) as http,
    ):
        answer = await sent(http)
    assert (answer.status_code, answer.headers["x-should-retry"]) == (status, "false")


async def test_malformed_http_is_not_worth_a_retry(front: RunningGateway) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", front.server.port)
    writer.write(b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n")
    async with asyncio.timeout(5.0):
        answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"\r\nx-should-retry: false\r\n" in answer


async def test_what_a_retry_does_mend(front: RunningGateway, http: httpx.AsyncClient) -> None:
    full = QueueStatus(model=MODEL, num_queued=9, bound=9, retry_after_s=2.5)
    await front.worker.bus.control.publish_queue_status(full)
    await eventually(lambda: bool(front.gateway.fleet.queues()))
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses"):
        answer = await http.post(path, json={"model": MODEL, **DOORS[path]})
        hints = (
            answer.status_code,
            answer.headers["retry-after"],
            answer.headers["x-should-retry"],
        )
        assert hints == (429, "3", "true")


@pytest.mark.parametrize(
    ("refusal", "hint"),
    [
        (Refusal(status=503, code="draining", message="", retry_after_s=1.0), True),
        (Refusal(status=429, code="a", message="", retry_after_s=9e5, comes_back=False), False),
        (Refusal(status=429, code="tokens_per_minute", message=""), False),
        (Refusal(status=409, code="cancelled", message=""), False),
        (Refusal(status=422, code="a", message=""), False),
        (Refusal(status=408, code="request_timeout", message=""), None),
        (Refusal(status=500, code="internal_error", message=""), None),
    ],
)
def test_each_refusal_has_its_retry_hint(refusal: Refusal, hint: bool | None) -> None:
    assert refusal.should_retry is hint
    value = {True: b"true", False: b"false", None: None}[hint]
    assert dict(refusal.headers).get(b"x-should-retry") == value
