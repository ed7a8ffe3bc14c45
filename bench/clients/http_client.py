"""An HTTP/1.1 client connection for one request after the other, with server-sent events.

It does what a load needs and little else, so that one core can take in tens of thousands of events
a second: answers with a length, chunked, or that end with the connection; no redirects, no
trailers, no compression.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from typing import TypeVar, cast

from bench.clients.events import read_event, read_refusal
from bench.clients.exchange import Exchange
from bench.settings import Target

_EVENT_STREAM = b"text/event-stream"
_MAX_HEAD_BYTES = 1 << 16
CONNECTION_LOST = "connection_lost"

_Protocol = TypeVar("_Protocol", bound=asyncio.Protocol)


class HttpConnection(asyncio.Protocol):
    """``send`` a request when ``is_idle``; the exchange is closed when its answer has ended."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._buffer = b""
        self._in_body = False
        self._is_stream = False
        self._is_chunked = False
        self._keep_alive = True
        self._left_bytes: int | None = None  # of a body with a length; None: until the end
        self._pending = b""  # of an event that is not whole yet
        self._data: list[bytes] = []
        self._body: list[bytes] = []
        self.is_open = False

    @property
    def is_idle(self) -> bool:
        return self.is_open and self._exchange is None

    def send(self, request: bytes, exchange: Exchange) -> None:
        """Write a whole request; its answer goes to ``exchange``. The connection must be idle."""
        assert self._transport is not None
        assert self.is_idle, "one request at a time"
        self._exchange = exchange
        self._in_body = False
        exchange.sent_s = time.perf_counter()
        self._transport.write(request)

    def close(self) -> None:
        """Part with the server, whatever it is doing."""
        if self._transport is not None:
            self._transport.abort()

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.is_open = True

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if self._exchange is None:
            return
        ends_the_body = self._in_body and not self._is_chunked and self._left_bytes is None
        if not (ends_the_body and exc is None):
            self._exchange.fail(CONNECTION_LOST)
        self._finish(time.perf_counter())

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        self._buffer = self._buffer + data if self._buffer else data
        try:
            while self._exchange is not None and self._step(now_s):
                pass
        except (ValueError, IndexError):
            self._break("malformed_http", now_s)

    # The answer, piece by piece.

    def _step(self, now_s: float) -> bool:
        """Go one piece further; False if more bytes are needed for that."""
        if not self._in_body:
            return self._read_head(now_s)
        return self._read_chunk(now_s) if self._is_chunked else self._read_plain(now_s)

    def _read_head(self, now_s: float) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > _MAX_HEAD_BYTES:
                raise ValueError("an endless head")
            return False
        assert self._exchange is not None
        first, *lines = self._buffer[:end].split(b"\r\n")
        self._buffer = self._buffer[end + 4 :]
        version, status = first.split(b" ", 2)[:2]
        if int(status) < 200:
            return True
        headers = {}
        for line in lines:
            name, _, value = line.partition(b":")
            headers[name.strip().lower()] = value.strip().lower()
        self._exchange.status = int(status)
        self._keep_alive = headers.get(b"connection") != b"close" and version == b"HTTP/1.1"
        self._is_chunked = headers.get(b"transfer-encoding") == b"chunked"
        length = headers.get(b"content-length")
        self._left_bytes = None if length is None else int(length)
        self._is_stream = self._exchange.status == 200 and headers.get(
            b"content-type", b""
        ).startswith(_EVENT_STREAM)
        self._in_body = True
        if self._left_bytes == 0 and not self._is_chunked:
            self._finish(now_s)
        return True

    def _read_chunk(self, now_s: float) -> bool:
        buffer, position = self._buffer, 0
        while (line_end := buffer.find(b"\r\n", position)) >= 0:
            size = int(buffer[position:line_end].split(b";", 1)[0], 16)
            start = line_end + 2
            if len(buffer) < start + size + 2:
                break
            position = start + size + 2
            if size == 0:
                self._buffer = buffer[position:]
                self._finish(now_s)
                return True
            self._take(buffer[start : start + size], now_s)
        self._buffer = buffer[position:]
        return False

    def _read_plain(self, now_s: float) -> bool:
        if not self._buffer:
            return False
        if self._left_bytes is None:
            data, self._buffer = self._buffer, b""
        else:
            data, self._buffer = (
                self._buffer[: self._left_bytes],
                self._buffer[self._left_bytes :],
            )
            self._left_bytes -= len(data)
        self._take(data, now_s)
        if self._left_bytes == 0:
            self._finish(now_s)
        return True

    def _take(self, data: bytes, now_s: float) -> None:
        if not self._is_stream:
            self._body.append(data)
            return
        exchange = self._exchange
        assert exchange is not None
        if self._pending:
            data = self._pending + data
        start = 0
        while (end := data.find(b"\n", start)) >= 0:
            line = data[start:end]
            start = end + 1
            if line.endswith(b"\r"):
                line = line[:-1]
            if line.startswith(b"data:"):
                self._data.append(line[6:] if line.startswith(b"data: ") else line[5:])
            elif not line and self._data:
                read_event(exchange, b"\n".join(self._data), now_s)
                self._data.clear()
        self._pending = data[start:]

    def _finish(self, now_s: float) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        exchange.body = b"".join(self._body)
        if self._is_stream and not exchange.finished:
            exchange.fail("cut_short")
        elif exchange.status and exchange.status != 200:
            read_refusal(exchange)
        self._body.clear()
        self._data.clear()
        self._pending = b""
        if not self._keep_alive:
            self.close()
            self.is_open = False
        exchange.close(now_s)

    def _break(self, code: str, now_s: float) -> None:
        if self._exchange is not None:
            self._exchange.fail(code)
        self._finish(now_s)
        self.close()


async def connect(target: Target, protocol: type[_Protocol]) -> _Protocol:
    """A connection to the server. Raises OSError if there is none to be had."""
    tls = ssl.create_default_context() if target.is_tls else None
    loop = asyncio.get_running_loop()
    _, made = await loop.create_connection(protocol, target.host, target.port, ssl=tls)
    return made


def request_bytes(
    target: Target, method: str, route: str, headers: list[tuple[str, str]], body: bytes
) -> bytes:
    """A whole request; ``route`` is below the base URL's path."""
    lines = [
        f"{method} {target.path}{route} HTTP/1.1",
        f"host: {target.authority}",
        "user-agent: millrace-bench",
        *(f"{name}: {value}" for name, value in headers),
    ]
    if body:
        lines += ["content-type: application/json", f"content-length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + body
