"""HTTP/1.1 client connection for one request after the other, with server-sent events.

It has only the features that a load needs, so that one core can receive tens of thousands of events
a second: answers with a length, chunked, or ended by the connection; no redirects, no trailers, no
compression.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from typing import TypeVar, cast

from httptools import HttpParserError, HttpResponseParser

from millrace.bench.clients.events import read_event, read_refusal
from millrace.bench.clients.exchange import ClientExchange
from millrace.bench.settings import ServerTarget

_EVENT_STREAM = b"text/event-stream"
_MAX_HEAD_BYTES = 1 << 16
CONNECTION_LOST = "connection_lost"

_Protocol = TypeVar("_Protocol", bound=asyncio.Protocol)


class ClientConnection(asyncio.Protocol):
    """Connection: ``send`` a request when ``is_idle``; the exchange is closed when its answer has
    ended."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._exchange: ClientExchange | None = None
        self.is_open = False

    @property
    def is_idle(self) -> bool:
        return self.is_open and self._exchange is None

    def send(self, request: bytes, exchange: ClientExchange) -> None:
        """Write a whole request; its answer goes to ``exchange``. The connection must be idle."""
        assert self._transport is not None
        assert self.is_idle, "one request at a time"
        self._exchange = exchange
        exchange.sent_s = time.perf_counter()
        self._transport.write(request)

    def close(self) -> None:
        """Abort the connection at once."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)


class HttpConnection(ClientConnection):
    """Connection for HTTP/1.1, open once it is made."""

    def __init__(self) -> None:
        super().__init__()
        self._parser = HttpResponseParser(self)
        self._now_s = 0.0  # when the piece of the answer came that is being read
        self._head_bytes = 0  # that came so far, until the body begins
        self._in_body = False
        self._is_stream = False
        self._is_delimited = False  # by a length or in chunks, not by the connection's end
        self._pending = b""  # of an event that is not whole yet
        self._data: list[bytes] = []
        self._body: list[bytes] = []

    def send(self, request: bytes, exchange: ClientExchange) -> None:
        self._head_bytes = 0
        super().send(request, exchange)

    # Callbacks of asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.is_open = True

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._now_s = time.perf_counter()
        is_end = self._in_body and not self._is_delimited and exc is None
        self._finish("" if is_end else CONNECTION_LOST)

    def data_received(self, data: bytes) -> None:
        if self._exchange is None:
            self.close()  # nothing was asked
            return
        self._now_s = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except HttpParserError:
            self._break()
            return
        if not self._in_body:
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD_BYTES:
                self._break()

    # Callbacks of the parser.

    def on_message_begin(self) -> None:
        self._in_body = self._is_stream = self._is_delimited = False

    def on_header(self, name: bytes, value: bytes) -> None:
        match name.lower():
            case b"content-length" | b"transfer-encoding":
                self._is_delimited = True
            case b"content-type":
                self._is_stream = value.lower().startswith(_EVENT_STREAM)

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self._exchange is not None and status >= 200:
            self._exchange.status = status
            self._is_stream &= status == 200
            self._in_body = True

    def on_body(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None:
            return  # a second answer
        if not self._is_stream:
            self._body.append(data)
            return
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
                read_event(exchange, b"\n".join(self._data), self._now_s)
                self._data.clear()
        self._pending = data[start:]

    def on_message_complete(self) -> None:
        if self._in_body:  # skip informational (1xx) answers
            keeps = self._parser.should_keep_alive()
            self._finish()
            if not keeps:
                self.close()

    def _finish(self, error: str = "") -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        if error:
            exchange.fail(error)
        exchange.body = b"".join(self._body)
        if self._is_stream and not exchange.finished:
            exchange.fail("cut_short")
        elif exchange.status and exchange.status != 200:
            read_refusal(exchange)
        self._body.clear()
        self._data.clear()
        self._pending = b""
        exchange.close(self._now_s)

    def _break(self) -> None:
        self._finish("malformed_http")
        self.close()


async def connect(target: ServerTarget, protocol: type[_Protocol]) -> _Protocol:
    """Connect to the server. Raises OSError on failure."""
    tls = ssl.create_default_context() if target.is_tls else None
    loop = asyncio.get_running_loop()
    _, made = await loop.create_connection(protocol, target.host, target.port, ssl=tls)
    return made


def request_bytes(
    target: ServerTarget, method: str, route: str, headers: list[tuple[str, str]], body: bytes
) -> bytes:
    """Return a whole request as bytes; ``route`` is below the base URL's path."""
    lines = [
        f"{method} {target.path}{route} HTTP/1.1",
        f"host: {target.authority}",
        "user-agent: millrace-bench",
        *(f"{name}: {value}" for name, value in headers),
    ]
    if body:
        lines += ["content-type: application/json", f"content-length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + body
