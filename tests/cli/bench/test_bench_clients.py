"""The load's connections: answers in any pieces, and every way in which they go wrong."""

from __future__ import annotations

import asyncio
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.bench.arrivals import arrival_times
from millrace.bench.clients.exchange import ClientExchange
from millrace.bench.clients.http_client import HttpConnection
from millrace.bench.clients.socket_client import SocketConnection, frame
from millrace.bench.spread import parse_spread

CUTS = st.lists(st.integers(min_value=1, max_value=40), max_size=60)


class _Wire(asyncio.Transport):
    """A transport that goes nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))

    def abort(self) -> None:
        self.aborted = True


def _exchange(loop: asyncio.AbstractEventLoop) -> ClientExchange:
    return ClientExchange(0, 0.0, loop)


def _http(
    answer: bytes, cuts: list[int], *, then_close: bool = False
) -> tuple[ClientExchange, _Wire]:
    """Return the exchange after an answer that arrives in pieces of these lengths."""
    loop = asyncio.new_event_loop()
    try:
        connection, wire, exchange = HttpConnection(), _Wire(), _exchange(loop)
        connection.connection_made(wire)
        connection.send(b"GET", exchange)
        for piece in _pieces(answer, cuts):
            connection.data_received(piece)
        if then_close:
            connection.connection_lost(None)
        return exchange, wire
    finally:
        loop.close()


def _pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    pieces, start = [], 0
    for cut in cuts:
        pieces.append(data[start : start + cut])
        start += cut
    return [piece for piece in [*pieces, data[start:]] if piece]


def _chunk(text: str | None, **fields: object) -> bytes:
    delta = {} if text is None else {"content": text}
    return json.dumps({"choices": [{"delta": delta, **fields}]}).encode()


USAGE = {
    "prompt_tokens": 4,
    "completion_tokens": 9,
    "prompt_tokens_details": {"cached_tokens": 3},
}
EVENTS = [
    b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}',
    b"data: " + _chunk("one"),
    b": a comment",
    b"data:" + _chunk("zwei\u00e4"),
    b"event: note\ndata: " + _chunk("three"),
    b"data: " + _chunk(None, finish_reason="stop"),
    b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode(),
    b"data: [DONE]",
]
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"


def _chunked(body: bytes, sizes: list[int]) -> bytes:
    chunks = [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in _pieces(body, sizes)]
    head = STREAM_HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    return b"HTTP/1.1 100 Continue\r\n\r\n" + head + b"".join(chunks) + b"0\r\n\r\n"


@given(cuts=CUTS, sizes=CUTS, ending=st.sampled_from([b"\n", b"\r\n"]))
def test_events_are_the_same_however_they_are_cut(
    cuts: list[int], sizes: list[int], ending: bytes
) -> None:
    body = b"".join(event.replace(b"\n", ending) + ending * 2 for event in EVENTS)
    exchange, wire = _http(_chunked(body, sizes), cuts)
    assert exchange.done.done()
    assert exchange.error == ""
    assert len(exchange.parts_s) == 3
    assert (exchange.prompt_tokens, exchange.output_tokens, exchange.cached_tokens) == (4, 9, 3)
    assert not wire.aborted


def test_a_stream_may_end_with_its_connection() -> None:
    body = b"".join(event + b"\n\n" for event in EVENTS)
    exchange, _ = _http(STREAM_HEAD + b"\r\n" + body, [], then_close=True)
    assert exchange.error == ""
    assert exchange.sample(0.0).num_output_tokens == 9


def test_completions_have_text() -> None:
    body = b'data: {"choices":[{"text":"a","finish_reason":"length"}]}\n\ndata: [DONE]\n\n'
    exchange, _ = _http(_chunked(body, []), [])
    assert len(exchange.parts_s) == 1
    assert exchange.sample(0.0).num_output_tokens == 1
    assert not exchange.sample(0.0).has_usage


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (_chunked(b"data: " + _chunk("a") + b"\n\n", []), "cut_short"),
        (_chunked(b"data: {nonsense\n\n", []), "malformed_event"),
        (_chunked(b'data: {"error":{"code":"worker_lost","message":"m"}}\n\n', []), "worker_lost"),
        (b"HTTP/1.1 503 X\r\nContent-Length: 4\r\n\r\noops", "503"),
        (
            b'HTTP/1.1 429 X\r\nContent-Length: 32\r\n\r\n{"error":{"type":"rate_limited"}}'[:-1],
            "429",
        ),
        (
            b'HTTP/1.1 429 X\r\nContent-Length: 33\r\n\r\n{"error":{"type":"rate_limited"}} ',
            "429 r",
        ),
        (STREAM_HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", "malformed_http"),
        (b"nonsense\r\n\r\n", "malformed_http"),
    ],
)
def test_what_goes_wrong_has_a_code(answer: bytes, error: str) -> None:
    exchange, _ = _http(answer, [])
    assert exchange.done.done()
    assert exchange.error.startswith(error)


def test_a_connection_that_is_lost_ends_its_request() -> None:
    whole = _chunked(b"data: " + _chunk("a") + b"\n\n", [])
    exchange, _ = _http(whole[:-20], [], then_close=True)
    assert exchange.error == "connection_lost"


def test_a_connection_serves_one_request_after_the_other_until_it_is_told_to_close() -> None:
    loop = asyncio.new_event_loop()
    connection, wire = HttpConnection(), _Wire()
    connection.connection_made(wire)
    for close in (b"", b"Connection: close\r\n"):
        exchange = _exchange(loop)
        connection.send(b"GET", exchange)
        connection.data_received(b"HTTP/1.1 200 OK\r\n" + close + b"Content-Length: 2\r\n\r\n{}")
        assert exchange.body == b"{}"
        assert connection.is_idle is not bool(close)
    assert wire.aborted
    loop.close()


# WebSocket.


def _server_frame(kind: int, payload: bytes, *, is_last: bool = True) -> bytes:
    masked = frame(kind, payload)
    length_bytes = {126: 2, 127: 8}.get(masked[1] & 0x7F, 0)
    head = bytearray(masked[: 2 + length_bytes])
    head[0] = (0x80 if is_last else 0) | kind
    head[1] &= 0x7F
    return bytes(head) + payload


def _message(kind: str, **fields: object) -> bytes:
    return json.dumps({"type": kind, "id": "0", "request_id": "r", **fields}).encode()


async def _socket(data: bytes, cuts: list[int]) -> tuple[ClientExchange, _Wire]:
    connection, wire = SocketConnection(), _Wire()
    connection.connection_made(wire)
    connection.data_received(b"HTTP/1.1 101 Switching\r\nUpgrade: websocket\r\n\r\n")
    await connection.opened
    exchange = _exchange(asyncio.get_running_loop())
    connection.send(b"{}", exchange)
    for piece in _pieces(data, cuts):
        connection.data_received(piece)
    return exchange, wire


@given(cuts=CUTS, filling=st.sampled_from([1, 200, 70_000]))
def test_messages_are_the_same_however_they_are_cut(cuts: list[int], filling: int) -> None:
    long_text = _message("delta", num_tokens=2, text="x" * filling)
    data = b"".join(
        (
            _server_frame(1, _message("accepted")),
            _server_frame(1, _message("delta", num_tokens=1, text="a")),
            _server_frame(9, b"are you there"),
            _server_frame(1, long_text[:10], is_last=False),
            _server_frame(0, long_text[10:]),
            _server_frame(1, _message("future_kind", anything=[1])),
            _server_frame(
                1,
                _message(
                    "done",
                    finish_reason="stop",
                    usage={"prompt_tokens": 5, "completion_tokens": 3},
                ),
            ),
        )
    )
    exchange, wire = asyncio.run(_socket(data, cuts))
    assert exchange.done.done()
    assert exchange.error == ""
    assert exchange.part_tokens.tolist() == [1, 2]
    assert exchange.output_tokens == 3
    assert wire.written[-1] == frame(0xA, b"are you there")


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (_server_frame(1, _message("error", code="queue_full", message="m")), "queue_full"),
        (_server_frame(1, b"{"), "malformed_message"),
        (_server_frame(8, (1013).to_bytes(2, "big")), "closed 1013"),
    ],
)
def test_what_goes_wrong_on_a_socket_has_a_code(data: bytes, error: str) -> None:
    exchange, _ = asyncio.run(_socket(data, []))
    assert exchange.done.done()
    assert exchange.error == error


# What is drawn at random.


def test_arrivals_have_their_rate_and_their_burstiness() -> None:
    steady = arrival_times(100.0, 1.0, 200.0, None, seed=1)
    bursty = arrival_times(100.0, 0.25, 200.0, None, seed=1)
    for times in (steady, bursty):
        assert len(times) == pytest.approx(20_000, rel=0.05)
        assert times[0] >= 0
        assert times[-1] < 200.0
    # The variation of gamma distributed gaps is one over the root of their shape.
    for times, variation in ((steady, 1.0), (bursty, 2.0)):
        gaps = times[1:] - times[:-1]
        assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.1)
    again = arrival_times(100.0, 1.0, 200.0, None, seed=1)
    assert (again == steady).all()
    assert len(arrival_times(3.0, 1.0, None, 17, seed=1)) == 17


@pytest.mark.parametrize("text", ["7", "uniform:3:9", "lognormal:100:0.5", "lognormal:100:0.5:120"])
def test_a_length_spread_draws_its_distribution(text: str) -> None:
    spread = parse_spread(text)
    assert str(spread) == text
    drawn = [spread.draw(random.Random(seed)) for seed in range(4_000)]
    mean = sum(drawn) / len(drawn)
    if text.startswith("lognormal"):
        assert mean == pytest.approx(100 if text.endswith("0.5") else 89, rel=0.05)
        assert max(drawn) <= spread.high
    else:
        assert set(drawn) == set(range(spread.low, spread.high + 1))
