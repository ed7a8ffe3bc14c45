"""Clients that mean no good, byte by byte: each gets an error or meets a limit, and the next
request works."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from millrace.runtime.http import protocol as http_protocol
from millrace.schemas.config import GatewayConfig
from millrace.schemas.websocket import SUBPROTOCOL
from tests.support.running_gateway import MODEL, RunningGateway, running_gateway
from tests.support.waiting import eventually

_TIMEOUT_S = 30.0  # Only a failing test waits this long.
_SHORT_S = 0.2
_NUM_CONNECTIONS = 1_000
_BODY_LIMIT_BYTES = 1024 * 1024
_HEAD = b"HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\n"
_HANDSHAKE = b"Upgrade: websocket\r\nConnection: Upgrade\r\n"
_KEY = b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
_VERSION = b"Sec-WebSocket-Version: 13\r\n"
_DEEP = 100_000

Json = dict[str, Any]

_BODIES = [
    b"[" * _DEEP,
    b'{"a":' * _DEEP,
    b'{"model":"echo","guided_json":' + b"[" * _DEEP + b"]" * _DEEP + b"}",
    b'{"model":"echo","metadata":' + b'{"a":' * _DEEP + b"1" + b"}" * _DEEP + b"}",
    b'{"model":"echo","prompt":"x","input":"x","temperature":1e400}',
    b'{"model":"echo","prompt":"x","input":"x","temperature":NaN}',
    b'{"model":"echo","prompt":"x","input":"x","temperature":-Infinity}',
    b'{"model":"echo","prompt":"x","input":"x","seed":' + b"9" * 5_000 + b"}",
    b'{"model":"echo","prompt":"\xff\xfe","input":"\xff"}',
    b'{"model":"echo","prompt":"\xed\xa0\x80","input":"\xed\xa0\x80"}',
    b'{"model":"echo","prompt":"\\ud800","input":"\\ud800"}',
    b'{"model":"echo","prompt":[' + b"9" * 400 + b'],"input":[' + b"9" * 400 + b"]}",
    b"\xef\xbb\xbf{}",
    b"\x00",
    b"",
    b'{"model":"echo",}',
    b'{"model":"echo"}{}',
]
_NO_HTTP = [
    b"\x00\x01\x02\x03\r\n\r\n",
    b"GET\r\n\r\n",
    b"PROPFIND * HTTP/1.1 EXTRA\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
    b"GET / HTTP/1.1\r\nHost: a\r\nBad Header: x\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nA: b\x00c\r\n\r\n",
    b"POST /v1/completions " + _HEAD + b"Content-Length: -5\r\n\r\n",
    b"POST /v1/completions " + _HEAD + b"Content-Length: 99999999999999999999\r\n\r\n",
    b"POST /v1/completions " + _HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    b"POST /v1/completions " + _HEAD + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n",
    b"POST /v1/completions " + _HEAD + b"Transfer-Encoding: chunked\r\n\r\n-1\r\nx\r\n",
    b"POST /v1/completions " + _HEAD + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
    b"POST /v1/completions "
    + _HEAD
    + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
]
_HANDSHAKES = [
    _HANDSHAKE,
    _HANDSHAKE + _KEY,
    _HANDSHAKE + _VERSION,
    _HANDSHAKE + _KEY + b"Sec-WebSocket-Version: 99\r\n",
    _HANDSHAKE + _VERSION + b"Sec-WebSocket-Key: short\r\n",
    _HANDSHAKE + _VERSION + _KEY + _KEY,
    _HANDSHAKE + _VERSION + _KEY + b"Sec-WebSocket-Protocol: ,,\r\n",
    _HANDSHAKE + _VERSION + _KEY + b"Sec-WebSocket-Protocol: other\r\n",
    _HANDSHAKE + _VERSION + _KEY + b"Origin: https://elsewhere.example\r\n",
    _HANDSHAKE + _VERSION + _KEY + b"A: b\r\n" * 500,
    _HANDSHAKE + _VERSION + _KEY + b"A: " + b"b" * 20_000 + b"\r\n",
    _HANDSHAKE + _VERSION + _KEY + b"A: \xff\xfe\r\n" + b"Sec-WebSocket-Protocol: other\r\n",
    b"Upgrade: h2c\r\nConnection: Upgrade\r\n",
]
_HEADERS = [
    ("Last-Event-ID", "absent/0", 404),
    ("Last-Event-ID", "a/" + "9" * 30, 400),
    ("Last-Event-ID", "a/1" + ",1" * 5_000, 400),
    ("Idempotency-Key", "a b", 400),
    ("Idempotency-Key", "k" * 256, 400),
    ("Authorization", "Bearer mr-" + "x" * 10_000, 401),
    ("Content-Type", "text/plain", 415),
]


@pytest.fixture
async def front() -> AsyncIterator[RunningGateway]:
    """Run a gateway, and check after each test that it answers and keeps nothing of the others."""
    config = GatewayConfig(max_body_bytes=_BODY_LIMIT_BYTES, max_sockets_per_address=50)
    async with running_gateway(config) as running:
        yield running
        async with httpx.AsyncClient(base_url=running.url, timeout=_TIMEOUT_S) as http:
            answer = await http.post("/v1/completions", json={"model": MODEL, "prompt": "well?"})
        assert answer.json()["choices"][0]["text"] == "well?"
        gateway = running.gateway
        await eventually(
            lambda: not (list(gateway.streams) or gateway.responses.all() or gateway.sockets),
            what="nothing left",
        )


class Raw:
    """A connection of bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def answer(self) -> tuple[int, Json]:
        """The status and the error of one answer with a length."""
        async with asyncio.timeout(_TIMEOUT_S):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = int(head.split("content-length: ")[1].split("\r\n")[0])
            body = await self.reader.readexactly(length)
        return int(head.split()[1]), json.loads(body)

    async def rest(self) -> bytes:
        """All that comes up to the end of the connection."""
        async with asyncio.timeout(_TIMEOUT_S):
            try:
                return await self.reader.read()
            except ConnectionResetError:
                return b""

    async def close(self) -> None:
        self.writer.close()


async def opened(front: RunningGateway) -> Raw:
    return Raw(*await asyncio.open_connection("127.0.0.1", front.server.port))


async def sent(front: RunningGateway, data: bytes) -> Raw:
    raw = await opened(front)
    raw.writer.write(data)
    return raw


async def sent_at_once(front: RunningGateway, data: bytes) -> Raw:
    """A connection that brings ``data``, of a few bytes, with it: however late the gateway, which
    shares this loop, comes to it, it can read them before it looks how long it waited."""
    client = socket.create_connection(("127.0.0.1", front.server.port))
    client.sendall(data)
    return Raw(*await asyncio.open_connection(sock=client))


def post(path: bytes, body: bytes, more: bytes = b"") -> bytes:
    return b"POST %b %bContent-Length: %d\r\n%b\r\n%b" % (path, _HEAD, len(body), more, body)


def assert_shape(error: Json) -> None:
    assert set(error) == {"error"}
    assert set(error["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "path", [b"/v1/chat/completions", b"/v1/completions", b"/v1/responses", b"/v1/embeddings"]
)
async def test_bodies_of_senseless_json(front: RunningGateway, path: bytes) -> None:
    """All on one connection, which stays good."""
    raw = await opened(front)
    for body in _BODIES:
        raw.writer.write(post(path, body))
        status, error = await raw.answer()
        assert status == 400, body[:80]
        assert_shape(error)
    raw.writer.write(b"GET /healthz " + _HEAD + b"\r\n")
    assert (await raw.answer())[0] == 200
    await raw.close()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings", "/v1/tokenize"])
async def test_a_body_of_10_megabytes(front: RunningGateway, path: str) -> None:
    body = b'{"model":"echo","prompt":"' + b"x" * 10_000_000 + b'"}'
    async with httpx.AsyncClient(base_url=front.url, timeout=_TIMEOUT_S) as http:
        answer = await http.post(path, content=body)
    assert answer.status_code == 413
    for size in (len(body), _BODY_LIMIT_BYTES):
        assert str(size) in answer.json()["error"]["message"]


async def test_what_is_no_http_is_refused(front: RunningGateway) -> None:
    for data in _NO_HTTP:
        raw = await sent(front, data)
        answer = await raw.rest()
        assert answer.startswith(b"HTTP/1.1 400 "), data[:80]
        assert_shape(json.loads(answer.partition(b"\r\n\r\n")[2]))
        await raw.close()


async def test_nonsense_behind_a_request_does_not_end_up_in_its_answer(
    front: RunningGateway,
) -> None:
    front.worker.gate.clear()
    body = b'{"model":"echo","prompt":"hello","stream":true}'
    raw = await sent(front, post(b"/v1/completions", body))
    await raw.reader.readuntil(b"\r\n\r\n")
    raw.writer.write(b"\x00\x01\x02 nonsense\r\n\r\n")
    await raw.writer.drain()
    front.worker.gate.set()
    answer, refusal = (await raw.rest()).split(b"0\r\n\r\n")
    assert answer.endswith(b"data: [DONE]\n\n\r\n")
    assert refusal.startswith(b"HTTP/1.1 400 ")
    await raw.close()


async def test_requests_before_nonsense_are_answered(front: RunningGateway) -> None:
    ask = post(b"/v1/completions", b'{"model":"echo","prompt":"hello"}')
    health = b"GET /healthz " + _HEAD + b"\r\n"
    for nonsense in (b"\x00 nonsense\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"X: " + b"y" * 70_000):
        raw = await sent(front, ask + health + ask + nonsense)
        assert [(await raw.answer())[0] for _ in range(4)] == [200, 200, 200, 400]
        assert await raw.rest() == b""
        await raw.close()


async def test_a_head_that_trickles_is_given_up_on(
    front: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "_HEAD_TIMEOUT_S", _SHORT_S)
    silent, blank = await opened(front), await sent(front, b"\r\n\r\n")
    slow = await sent(front, b"GET / HTTP/1.1\r\n")
    again = await sent(front, b"GET /healthz " + _HEAD + b"\r\n")
    assert (await again.answer())[0] == 200
    again.writer.write(b"G")

    async def trickle() -> None:
        while True:
            slow.writer.write(b"X: y\r\n")
            blank.writer.write(b"\r\n")
            await asyncio.sleep(0.02)

    trickling = asyncio.create_task(trickle())
    try:
        for raw in (slow, again):
            status, error = await raw.answer()
            assert (status, error["error"]["code"]) == (408, "request_timeout")
        for raw in (silent, blank, slow, again):
            assert await raw.rest() == b""
    finally:
        trickling.cancel()
    for raw in (silent, blank, slow, again):
        await raw.close()


async def test_a_body_that_nobody_asked_for_is_given_up_on(
    front: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "_HEAD_TIMEOUT_S", _SHORT_S)
    raw = await sent(front, b"GET /healthz " + _HEAD + b"Content-Length: 1000\r\n\r\n")
    assert (await raw.answer())[0] == 200
    raw.writer.write(b"x")
    assert await raw.rest() == b""
    await raw.close()


async def test_requests_in_one_breath_are_answered_in_order(front: RunningGateway) -> None:
    paths = [b"/healthz", b"/absent", b"/v1/models"] * 20
    raw = await sent(front, b"".join(b"GET %b %b\r\n" % (path, _HEAD) for path in paths))
    statuses = [(await raw.answer())[0] for _ in paths]
    assert statuses == [200, 404, 200] * 20
    await raw.close()


async def test_streams_in_one_breath_to_a_slow_reader_are_whole(front: RunningGateway) -> None:
    """The second request is there before any of the first answer has been read."""
    size = 2_000
    body = json.dumps({"model": MODEL, "prompt": "x" * size, "max_tokens": size, "stream": True})
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    client.connect(("127.0.0.1", front.server.port))
    reader, writer = await asyncio.open_connection(sock=client, limit=4_096)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(post(b"/v1/completions", body.encode()) * 2)
    await eventually(lambda: len(front.worker.jobs) == 1 and not front.worker.num_running)
    writer.transport.resume_reading()  # type: ignore[attr-defined]
    received = b""
    async with asyncio.timeout(_TIMEOUT_S):
        while received.count(b"data: [DONE]\n\n") < 2:
            piece = await reader.read(65_536)
            assert piece, "cut off"
            received += piece
    assert received.count(b"HTTP/1.1 200 OK") == 2
    writer.close()


async def test_clients_that_close_their_half(front: RunningGateway) -> None:
    front.worker.gate.clear()
    body = b'{"model":"echo","prompt":"hello","stream":true}'
    raws = [await sent(front, post(b"/v1/completions", body)) for _ in range(20)]
    await eventually(lambda: front.worker.num_running == 20)
    for raw in raws:
        raw.writer.write_eof()
    await eventually(lambda: not list(front.gateway.streams), what="all cancelled")
    front.worker.gate.set()
    for raw in raws:
        await raw.close()


@pytest.mark.parametrize("data", [b"", b"POST /v1/completions " + _HEAD])
async def test_a_thousand_connections_do_no_harm(
    front: RunningGateway, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "_HEAD_TIMEOUT_S", 2.0)
    raws = [await sent_at_once(front, data) for _ in range(_NUM_CONNECTIONS)]
    async with httpx.AsyncClient(base_url=front.url, timeout=_TIMEOUT_S) as http:
        assert (await http.get("/healthz")).status_code == 200
    answers = await asyncio.gather(*(raw.rest() for raw in raws))
    assert all(b" 408 " in answer if data else not answer for answer in answers)
    for raw in raws:
        await raw.close()


async def test_a_thousand_sockets_meet_the_limit(front: RunningGateway) -> None:
    limit = front.gateway.config.max_sockets_per_address
    sockets, refusals = [], []

    async def connect_one() -> None:
        try:
            sockets.append(await connect(front.ws_url, subprotocols=[SUBPROTOCOL]))  # type: ignore[list-item]
        except InvalidStatus as error:
            refusals.append(error.response)

    for _ in range(0, _NUM_CONNECTIONS, 100):
        await asyncio.gather(*(connect_one() for _ in range(100)))
    assert len(sockets) == limit
    for response in refusals:
        assert response.status_code == 429
        assert json.loads(response.body)["error"]["code"] == "too_many_sockets"
        assert "retry-after" in response.headers
    await asyncio.gather(*(one.close() for one in sockets))
    await eventually(lambda: not front.gateway.sockets)
    async with connect(front.ws_url, subprotocols=[SUBPROTOCOL]) as connection:  # type: ignore[list-item]
        await connection.send('{"type":"ping"}')
        assert json.loads(await connection.recv())["type"] == "pong"


@pytest.mark.parametrize("start", [b"GET /v1/ws ", b"GET /absent ", b"POST /v1/ws "])
async def test_handshakes_that_are_none(
    front: RunningGateway, start: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    for head in _HANDSHAKES:
        raw = await sent(front, start + _HEAD + head + b"\r\n")
        async with asyncio.timeout(_TIMEOUT_S):
            answer = await raw.reader.readuntil(b"\r\n\r\n")
        assert answer[:10] == b"HTTP/1.1 4", head[:80]
        await raw.close()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_sockets_that_stop_in_the_middle_of_a_frame(front: RunningGateway) -> None:
    start = b"GET /v1/ws " + _HEAD + _HANDSHAKE + _KEY + _VERSION + b"\r\n"
    raws = [await sent(front, start) for _ in range(20)]
    for raw in raws:
        assert b" 101 " in await raw.reader.readuntil(b"\r\n\r\n")
        raw.writer.write(b"\x81\xfe\x10\x00\x00\x00")
    await eventually(lambda: len(front.gateway.sockets) == 20)
    for raw in raws:
        raw.writer.transport.abort()
    await eventually(lambda: not front.gateway.sockets)


async def test_headers_of_senseless_values(front: RunningGateway) -> None:
    body = {"model": MODEL, "prompt": "hi", "stream": True}
    async with httpx.AsyncClient(base_url=front.url, timeout=_TIMEOUT_S) as http:
        for name, value, status in _HEADERS:
            headers = {name: value}
            answer = await http.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == status, (name, value[:80], answer.text)
            if status != 200:
                assert_shape(answer.json())
