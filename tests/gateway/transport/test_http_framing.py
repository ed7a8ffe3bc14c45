"""HTTP/1.1 by its bytes: upgrades, trailers, bounds, versions and methods, through the gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from millrace.schemas.config import GatewayConfig
from tests.support.running_gateway import MODEL, RunningGateway, running_gateway

_TIMEOUT_S = 20.0
_BODY = json.dumps({"model": MODEL, "prompt": "hello"}).encode()
_LENGTH = b"Content-Length: %d\r\n" % len(_BODY)
_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\n"
_CHUNKED = _HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
_CHUNKS = b"%x\r\n%b\r\n0\r\n" % (len(_BODY), _BODY)
_NEXT = b"GET /v1/models HTTP/1.1\r\nHost: gateway\r\n\r\n"
_LAST = b"GET /healthz HTTP/1.1\r\nHost: gateway\r\nConnection: close\r\n\r\n"
_POST = b"POST /healthz HTTP/1.1\r\nHost: a\r\n"
_LINE = b"X: " + b"y" * 1_000 + b"\r\n"
_H2C = (
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\n"
)
# The head that Java 17's HttpClient sends by default, in a segment before that of the body.
_JAVA = (
    b"POST /v1/completions HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\n"
    b"Content-Length: 33\r\nHost: 127.0.0.1:18123\r\n"
    b"HTTP2-Settings: AAEAAEAAAAIAAAAAAAMAAAAAAAQBAAAAAAUAAEAAAAYABgAA\r\nUpgrade: h2c\r\n"
    b"User-Agent: Java-http-client/17.0.15\r\nContent-Type: application/json\r\n\r\n"
)


@pytest.fixture
async def front() -> AsyncIterator[RunningGateway]:
    async with running_gateway(GatewayConfig()) as running:
        yield running


class Answer:
    """The bytes of one response."""

    def __init__(self, head: bytes, body: bytes) -> None:
        status, *lines = head.decode().rstrip().split("\r\n")
        self.status = int(status.split()[1])
        self.headers = {
            name.lower(): value for name, _, value in (one.partition(": ") for one in lines)
        }
        self.body = body

    @property
    def code(self) -> str:
        return str(json.loads(self.body)["error"]["code"])

    @property
    def text(self) -> str:
        return str(json.loads(self.body)["choices"][0]["text"])


async def exchanged(front: RunningGateway, *pieces: bytes) -> list[Answer]:
    """The responses to pieces that are sent one after the other, up to the end of the connection,
    which the gateway closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", front.server.port)
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(0.001 if len(pieces) < 10 else 0)
    async with asyncio.timeout(_TIMEOUT_S):
        received = await reader.read()
    writer.close()
    answers = []
    while received:
        head, _, received = received.partition(b"\r\n\r\n")
        answer = Answer(head, b"")
        size = int(answer.headers.get("content-length", len(received)))
        answer.body, received = received[:size], received[size:]
        answers.append(answer)
    return answers


@pytest.mark.parametrize("split", ["one segment", "two segments", "byte by byte"])
@pytest.mark.parametrize(
    "upgrade",
    [
        _H2C,
        b"Connection: Upgrade\r\nUpgrade: websocket\r\n",
        b"Connection: upgrade\r\nUpgrade: TLS/1.2\r\n",
        b"Connection: keep-alive\r\nConnection: Upgrade\r\nUpgrade: h2c, websocket\r\n",
    ],
)
async def test_an_upgrade_that_is_not_offered_is_ignored(
    front: RunningGateway, upgrade: bytes, split: str
) -> None:
    first = _HEAD + upgrade + _LENGTH + b"\r\n"
    chunked = _HEAD + upgrade + b"Transfer-Encoding: chunked\r\n\r\n" + _CHUNKS + b"\r\n"
    without_body = b"GET /v1/models HTTP/1.1\r\nHost: gateway\r\n" + _H2C + b"\r\n"
    rest = _BODY + chunked + without_body + _NEXT + _LAST
    if split == "one segment":
        pieces = [first + rest]
    elif split == "two segments":
        pieces = [first, rest]
    else:
        pieces = [bytes((byte,)) for byte in first + rest]
    answers = await exchanged(front, *pieces)
    assert [one.status for one in answers] == [200] * 5
    assert [one.text for one in answers[:2]] == ["hello", "hello"]
    assert [json.loads(one.body)["data"][0]["id"] for one in answers[2:4]] == [MODEL, MODEL]


async def test_java_s_client_is_served(front: RunningGateway) -> None:
    body = b'{"model":"echo","prompt":"hello"}'
    answers = await exchanged(front, _JAVA, body, _JAVA + body, _LAST)
    assert [one.text for one in answers[:2]] == ["hello", "hello"]
    assert [one.status for one in answers] == [200, 200, 200]


async def test_a_stream_is_served_to_a_client_that_offers_an_upgrade(front: RunningGateway) -> None:
    body = json.dumps({"model": MODEL, "prompt": "hello", "stream": True}).encode()
    head = _HEAD + _H2C.replace(b"Upgrade,", b"Upgrade, close,")
    (answer,) = await exchanged(front, head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    assert answer.status == 200
    assert answer.body.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_http_2_is_refused_in_words(front: RunningGateway) -> None:
    (answer,) = await exchanged(front, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0" * 9)
    assert (answer.status, answer.code) == (505, "http_version_not_supported")
    assert "HTTP/1.1" in json.loads(answer.body)["error"]["message"]


@pytest.mark.parametrize("path", [b"/v1/completions", b"/absent", b"/healthz", b"/v1/files"])
@pytest.mark.parametrize("split", [1, 64, 1_000_000])
async def test_trailers_are_not_headers(front: RunningGateway, path: bytes, split: int) -> None:
    """``Origin`` and a forwarded address would be refused or believed in a head."""
    trailers = (
        b"Authorization: Bearer mr-x\r\nIdempotency-Key: a b\r\nOrigin: https://a.example\r\n"
        b"X-Forwarded-For: 1.2.3.4\r\nLast-Event-ID: absent/0\r\nX-Request-ID: mine\r\n\r\n"
    )
    request = _CHUNKED.replace(b"/v1/completions", path) + _CHUNKS + trailers
    data = request + _LAST
    pieces = [data[start : start + split] for start in range(0, len(data), split)]
    answer, last = await exchanged(front, *pieces)
    without = await exchanged(
        front, _CHUNKED.replace(b"/v1/completions", path) + _CHUNKS + b"\r\n" + _LAST
    )
    assert (answer.status, last.status) == (without[0].status, 200)
    assert answer.status in (200, 404, 405, 415, 400)
    assert answer.headers["x-request-id"] != "mine"


async def test_a_trailer_that_closes_the_connection_closes_it(front: RunningGateway) -> None:
    """The parser reads no further, so a request behind it must not wait for ever."""
    for path in (b"/v1/completions", b"/absent"):
        request = _CHUNKED.replace(b"/v1/completions", path) + _CHUNKS
        answers = await exchanged(front, request + b"Connection: close\r\n\r\n" + _NEXT)
        assert [one.status for one in answers] == [200 if path != b"/absent" else 404]


@pytest.mark.parametrize(
    ("before", "line"),
    [
        pytest.param(b"GET / HTTP/1.1\r\nHost: a\r\n", _LINE, id="head"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: a\r\nX: ", b"y" * 1_000, id="one header"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: a\r\n", b"a: b\r\n", id="number of headers"),
        pytest.param(b"GET /healthz HTTP/1.1\r\nHost: a\r\nX-", b"y" * 1_000, id="one name"),
        pytest.param(_CHUNKED + _CHUNKS, _LINE, id="trailers"),
        pytest.param(_CHUNKED + _CHUNKS + b"X: ", b"y" * 1_000, id="one trailer"),
        pytest.param(_CHUNKED + _CHUNKS, b"a: b\r\n", id="number of trailers"),
        pytest.param(_CHUNKED + b"1;", b"y" * 1_000, id="one extension"),
        pytest.param(_CHUNKED + b"1;a=", b"y" * 1_000, id="one extension's value"),
        pytest.param(_CHUNKED, b"1;" + b"e" * 500 + b"\r\n \r\n", id="many extensions"),
        pytest.param(b"\r\n" * 10, b"\r\n" * 500, id="blank lines"),
    ],
)
@pytest.mark.parametrize("num_bytes", [100_000, 3_000_000])
async def test_what_is_no_body_has_a_bound(
    front: RunningGateway, before: bytes, line: bytes, num_bytes: int
) -> None:
    data = before + line * (num_bytes // len(line))
    for pieces in ([data], [data[start : start + 999] for start in range(0, len(data), 999)]):
        (answer,) = await exchanged(front, *pieces[:200])
        assert (answer.status, answer.code) == (431, "request_header_fields_too_large")
        assert answer.headers["connection"] == "close"
        assert "date" in answer.headers


async def test_what_is_within_the_bounds_is_served(front: RunningGateway) -> None:
    small = b"".join(b"1\r\n%c\r\n" % byte for byte in _BODY)
    signed = b"".join(b"1;signature=%b\r\n%c\r\n" % (b"f" * 64, byte) for byte in _BODY)
    spaces = b"%x\r\n%b\r\n" % (2_000_000, b" " * 2_000_000)
    requests = [
        _HEAD + b"X: y\r\n" * 120 + _LENGTH + b"\r\n" + _BODY,
        _HEAD + b"X: " + b"y" * 60_000 + b"\r\n" + _LENGTH + b"\r\n" + _BODY,
        _CHUNKED + small + b"0\r\n" + b"a: b\r\n" * 128 + b"\r\n",
        _CHUNKED + signed + b"0\r\n\r\n",
        _CHUNKED + spaces + _CHUNKS + b"X: " + b"y" * 60_000 + b"\r\n\r\n",
    ]
    answers = await exchanged(front, *requests, _LAST)
    assert [one.status for one in answers] == [200] * 6


async def test_a_target_has_a_bound(front: RunningGateway) -> None:
    (answer,) = await exchanged(front, b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n")
    assert (answer.status, answer.code) == (414, "uri_too_long")


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /healthz HTTP/1.1\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nHost: a\r\nHost: a\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nHost: a\r\nhost: b\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nHost: a b\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nHost: a, b\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nHost: user@a\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nHost: a/b\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nHost: [\r\n", 400),
        (b"GET /healthz HTTP/1.0\r\nHost: a\r\nHost: a\r\n", 400),
        (b"GET /healthz HTTP/1.0\r\n", 200),
        (b"GET /healthz HTTP/1.1\r\nHost: [::1]:8000\r\nConnection: close\r\n", 200),
        (b"GET /healthz HTTP/1.1\r\nHost:\r\nConnection: close\r\n", 200),
        (_POST + b"Transfer-Encoding: gzip, chunked\r\n", 501),
        (_POST + b"Transfer-Encoding: x\r\nTransfer-Encoding: chunked\r\n", 501),
        (_POST + b"Transfer-Encoding: gzip\r\n", 400),
        (_POST + b"Transfer-Encoding: chunked, gzip\r\n", 400),
        (_POST + b"Transfer-Encoding: chunked, chunked\r\n", 400),
        (b"POST /healthz HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n", 400),
        (_POST + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n", 400),
        (_POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n", 400),
        (b"GET /healthz HTTP/2.0\r\nHost: a\r\n", 505),
        (b"GET /healthz HTTP/9.9\r\nHost: a\r\n", 505),
        (b"CONNECT a:443 HTTP/1.1\r\nHost: a\r\n", 501),
    ],
)
async def test_heads_that_are_no_heads(front: RunningGateway, head: bytes, status: int) -> None:
    answers = await exchanged(front, head + b"\r\n")
    assert [one.status for one in answers] == [status]
    byte_by_byte = await exchanged(front, *(bytes((byte,)) for byte in head + b"\r\n"))
    assert [one.status for one in byte_by_byte] == [status]


@pytest.mark.parametrize(
    ("path", "allow"),
    [
        (b"/v1/chat/completions", "POST"),
        (b"/v1/messages", "POST"),
        (b"/v1/files", "GET, HEAD, POST"),
        (b"/v1/files/file-1", "DELETE, GET, HEAD"),
        (b"/v1/batches", "GET, HEAD, POST"),
        (b"/v1/responses", "POST"),
        (b"/v1/responses/resp-1", "DELETE, GET, HEAD"),
        (b"/v1/embeddings", "POST"),
        (b"/v1/models", "GET, HEAD"),
        (b"/v1/ws", "GET, HEAD"),
        (b"/ping", "GET, HEAD, POST"),
        (b"/static/chat.js", "GET, HEAD"),
        (b"/ops/", "GET, HEAD"),
    ],
)
async def test_a_method_that_a_path_does_not_take(
    front: RunningGateway, path: bytes, allow: str
) -> None:
    for method in (b"PATCH", b"BREW", b"get", b"TRACE", b"PROPFIND", b"DESCRIBE"):
        request = method + b" " + path + b" HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
        for pieces in ([request], [request[:3], request[3:]]):
            (answer,) = await exchanged(front, *pieces)
            assert (answer.status, answer.headers["allow"]) == (405, allow)
            if path != b"/v1/messages":
                assert answer.code == "method_not_allowed"
            assert f"not {method.decode()}" in json.loads(answer.body)["error"]["message"]


async def test_a_socket_s_path_asks_for_its_handshake(front: RunningGateway) -> None:
    for version, more in (
        (b"1.1", b"Connection: close\r\n"),
        (b"1.1", b"Connection: close\r\nUpgrade: websocket\r\n"),
        (b"1.1", b"Connection: close, Upgrade\r\nUpgrade: h2c\r\n"),
        (b"1.0", b"Connection: Upgrade\r\nUpgrade: websocket\r\n"),
    ):
        head = b"GET /v1/ws HTTP/" + version + b"\r\nHost: a\r\n" + more
        (answer,) = await exchanged(front, head + b"\r\n")
        assert (answer.status, answer.code) == (426, "upgrade_required")
        assert answer.headers["upgrade"] == "websocket"


_KEY = b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
_VERSION = b"Sec-WebSocket-Version: 13\r\n"


@pytest.mark.parametrize(
    ("more", "status", "code", "param"),
    [
        (_KEY, 426, "upgrade_required", "sec-websocket-version"),
        (_KEY + b"Sec-WebSocket-Version: 8\r\n", 426, "upgrade_required", "sec-websocket-version"),
        (_KEY + _VERSION * 2, 426, "upgrade_required", "sec-websocket-version"),
        (_VERSION, 400, "invalid_handshake", "sec-websocket-key"),
        (
            _VERSION + b"Sec-WebSocket-Key: short\r\n",
            400,
            "invalid_handshake",
            "sec-websocket-key",
        ),
        (_VERSION + _KEY * 2, 400, "invalid_handshake", "sec-websocket-key"),
        (
            _VERSION + _KEY + b"Sec-WebSocket-Protocol: ,,\r\n",
            400,
            "invalid_handshake",
            "sec-websocket-protocol",
        ),
        (
            _VERSION + _KEY + b"A: " + b"b" * 20_000 + b"\r\n",
            431,
            "request_header_fields_too_large",
            None,
        ),
        (_VERSION + _KEY + b"A: b\r\n" * 200, 431, "request_header_fields_too_large", None),
    ],
)
async def test_a_bad_handshake_is_refused_in_the_form_of_all_errors(
    front: RunningGateway, more: bytes, status: int, code: str, param: str | None
) -> None:
    head = b"GET /v1/ws HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    (answer,) = await exchanged(front, head + more + b"\r\n")
    error = json.loads(answer.body)["error"]
    assert (answer.status, error["code"], error["param"]) == (status, code, param)
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    assert answer.headers.get("sec-websocket-version") == ("13" if status == 426 else None)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_client_of_http_1_0_gets_no_chunks(
    front: RunningGateway, *, is_stream: bool
) -> None:
    body = json.dumps({"model": MODEL, "prompt": "hello", "stream": is_stream}).encode()
    head = b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body)
    (answer,) = await exchanged(front, head + body)
    assert answer.status == 200
    assert "transfer-encoding" not in answer.headers
    if is_stream:
        events = answer.body.decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        assert all(event.startswith(("data: ", "id: ")) for event in events[:-1])
    else:
        assert answer.text == "hello"
