"""Refusals at and below ``/v1/messages``, as Anthropic's own client reads them."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx
import pytest

from millrace.schemas.config import GatewayConfig, RedisConfig
from tests.support.running_gateway import MODEL, RunningGateway, running_gateway
from tests.support.servers import RedisServer

HELLO: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 200,
    "messages": [{"role": "user", "content": "Hello there."}],
}


@pytest.mark.parametrize(
    ("fields", "kind", "error", "param"),
    [
        ({"messages": []}, "invalid_request_error", anthropic.BadRequestError, "messages"),
        ({"model": "none"}, "not_found_error", anthropic.NotFoundError, "model"),
        ({"max_tokens": None}, "invalid_request_error", anthropic.BadRequestError, "max_tokens"),
        ({"wat": 1}, "invalid_request_error", anthropic.BadRequestError, "wat"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "invalid_request_error",
            anthropic.BadRequestError,
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": "x" * 5_000}]},
            "invalid_request_error",
            anthropic.BadRequestError,
            "messages",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_cannot_be_honoured(
    sdk: anthropic.AsyncAnthropic,
    fields: dict[str, Any],
    kind: str,
    error: type[anthropic.APIStatusError],
    param: str,
    stream: bool,
) -> None:
    with pytest.raises(error) as caught:
        await sdk.messages.create(**HELLO, extra_body=fields, stream=stream)
    body: Any = caught.value.body
    assert (body["type"], body["error"]["type"], body["error"]["param"]) == ("error", kind, param)
    assert caught.value.request_id is not None
    assert caught.value.request_id.startswith("msg-")


async def test_a_key_that_opens_nothing(redis_server: RedisServer) -> None:
    config = GatewayConfig(auth="required")
    async with (
        running_gateway(config, redis=RedisConfig(url=redis_server.url)) as front,
        anthropic.AsyncAnthropic(base_url=front.url, api_key="mr-none", max_retries=0) as sdk,
    ):
        with pytest.raises(anthropic.AuthenticationError) as refused:
            await sdk.messages.create(**HELLO)
        with pytest.raises(anthropic.AuthenticationError) as refused_below:
            await sdk.messages.count_tokens(model=MODEL, messages=HELLO["messages"])
    assert refused.value.type == refused_below.value.type == "authentication_error"


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/v1/messages", 405, "invalid_request_error"),
        ("GET", "/v1/messages/count_tokens", 405, "invalid_request_error"),
        ("POST", "/v1/messages/none", 404, "not_found_error"),
        ("POST", "/v1/messages", 400, "invalid_request_error"),
        ("POST", "/v1/messages/count_tokens", 400, "invalid_request_error"),
    ],
)
async def test_what_is_no_request(
    http: httpx.AsyncClient, method: str, path: str, status: int, kind: str
) -> None:
    answer = await http.request(method, path)
    assert answer.status_code == status
    assert (answer.json()["type"], answer.json()["error"]["type"]) == ("error", kind)
    assert answer.headers["request-id"] == answer.headers["x-request-id"]


async def test_a_body_that_is_too_large() -> None:
    async with (
        running_gateway(GatewayConfig(max_body_bytes=2_000)) as front,
        anthropic.AsyncAnthropic(base_url=front.url, api_key="none", max_retries=0) as sdk,
    ):
        large: Any = [{"role": "user", "content": "x" * 3_000}]
        for ask in (
            lambda: sdk.messages.create(model=MODEL, max_tokens=5, messages=large),
            lambda: sdk.messages.count_tokens(model=MODEL, messages=large),
        ):
            with pytest.raises(anthropic.RequestTooLargeError) as refused:
                await ask()
            body: Any = refused.value.body
            assert body["error"]["type"] == "request_too_large"


async def test_our_id_stands_beside_the_clients(
    http: httpx.AsyncClient, front: RunningGateway
) -> None:
    answer = await http.post("/v1/messages", json=HELLO, headers={"X-Request-Id": "theirs"})
    assert answer.headers["x-request-id"] == "theirs"
    assert answer.headers["request-id"] == answer.json()["id"] == front.worker.jobs[0].request_id


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([""], "stop_sequences must not have an empty string"),
        (["a"] * 17, "stop_sequences must have at most 16 strings"),
    ],
)
async def test_stop_sequences_are_refused_in_the_words_of_the_api(
    http: httpx.AsyncClient, given: list[str], message: str
) -> None:
    answer = await http.post("/v1/messages", json=HELLO | {"stop_sequences": given})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["message"]) == (
        400,
        "stop_sequences",
        message,
    )
