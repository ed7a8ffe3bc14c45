"""Bodies that come drop by drop, whole or in chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from millrace.gateway.transport.http import BodyDeadline
from millrace.schemas.config import GatewayConfig
from tests.gateway.api.test_hostile_clients import Raw, sent
from tests.support.running_gateway import RunningGateway, running_gateway

_TIMEOUT_S = 0.3
_HOST = b"HTTP/1.1\r\nHost: gateway\r\n"
_JSON = b"Content-Type: application/json\r\n"
_FORM = b"Content-Type: multipart/form-data; boundary=x\r\n"
_PART = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
_CHUNKED = b"Transfer-Encoding: chunked\r\n"
_LENGTH = b"Content-Length: 100000\r\n"
_PATHS = [
    b"/v1/chat/completions",
    b"/v1/responses",
    b"/v1/embeddings",
    b"/v1/tokenize",
    b"/v1/batches",
]


@pytest.fixture
async def hurried() -> AsyncIterator[RunningGateway]:
    config = GatewayConfig(body_timeout_s=_TIMEOUT_S, body_bytes_per_s=1_000_000)
    async with running_gateway(config) as front:
        yield front


@asynccontextmanager
async def trickling(raw: Raw, drop: bytes) -> AsyncIterator[None]:
    """Send so much again and again."""

    async def trickle() -> None:
        while True:
            raw.writer.write(drop)
            await asyncio.sleep(0.02)

    task = asyncio.create_task(trickle())
    try:
        yield
    finally:
        task.cancel()
        await raw.close()


async def is_given_up_on(front: RunningGateway, head: bytes, drop: bytes) -> None:
    raw = await sent(front, head)
    async with trickling(raw, drop):
        status, error = await raw.answer()
        assert (status, error["error"]["code"]) == (408, "request_timeout")
        assert "too slowly" in error["error"]["message"]
        assert await raw.rest() == b""
    async with httpx.AsyncClient(base_url=front.url, timeout=10) as client:
        assert (await client.get("/healthz")).status_code == 200


@pytest.mark.parametrize("path", _PATHS)
async def test_a_body_that_trickles_is_given_up_on(hurried: RunningGateway, path: bytes) -> None:
    await is_given_up_on(hurried, b"POST %b %b%b%b\r\n" % (path, _HOST, _JSON, _LENGTH), b" ")


@pytest.mark.parametrize("path", _PATHS[:1])
async def test_a_chunked_body_that_trickles_is_given_up_on(
    hurried: RunningGateway, path: bytes
) -> None:
    head = b"POST %b %b%b%b\r\n" % (path, _HOST, _JSON, _CHUNKED)
    await is_given_up_on(hurried, head, b"1\r\n{\r\n")


@pytest.mark.parametrize(
    ("how", "part", "drop"),
    [(_LENGTH, _PART, b"{"), (_CHUNKED, b"%x\r\n%b\r\n" % (len(_PART), _PART), b"1\r\n{\r\n")],
)
async def test_a_file_upload_that_trickles_is_given_up_on(
    hurried: RunningGateway, how: bytes, part: bytes, drop: bytes
) -> None:
    head = b"POST /v1/files %b%b%b\r\n%b" % (_HOST, _FORM, how, part)
    await is_given_up_on(hurried, head, drop)


def test_a_body_at_the_least_rate_has_the_time_that_it_takes() -> None:
    config = GatewayConfig(body_timeout_s=30.0, body_bytes_per_s=32_768)
    deadline = BodyDeadline(config, begun_s=100.0)
    assert deadline.at_s(0, 100.0) == 130.0
    num_bytes, now_s = 0, 100.0
    while num_bytes < config.max_file_bytes:  # 53 minutes
        num_bytes, now_s = num_bytes + 32_768, now_s + 1.0
        assert now_s < deadline.at_s(num_bytes, now_s) == now_s + 30.0
    # At half of that, it is over after a minute; in silence, after as long as at the beginning.
    assert deadline.at_s(30 * 32_768, 160.0) == 160.0
    assert deadline.at_s(10**9, 200.0) == 230.0
