"""HTTP/1.1 protocol of all ports: bounds on everything except the body, no trailers, clear
refusals."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from millrace.runtime.http.head import (
    MAX_FIELDS,
    MAX_HEAD_BYTES,
    HttpFault,
    head_fault,
    invalid,
    split,
    tokens,
    too_large,
    wrong_version,
)

_HEAD_TIMEOUT_S = 20.0
_LINGER_S = 2.0
_LINGER_BYTES = 64 * 1024 * 1024
_SLICE_BYTES = 16_384  # fed to the parser at a time; the bounds are checked after each slice
_CHUNK_LINES_BYTES = 16  # a chunk without extensions: its size in hexadecimal and two CRLFs
_MAX_METHOD_BYTES = 32
_METHODS = frozenset(
    (b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS", b"TRACE", b"CONNECT")
) | {b"PRI"}
# The parser knows this method and no endpoint does. It replaces unknown methods for the parser.
_STAND_IN = b"SEARCH"
_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_H2_REASON = "Pause on PRI/Upgrade"
_VERSION_REASON = "Invalid HTTP version"


class HttpProtocol(HttpToolsProtocol):
    """HTTP connection. Subclasses choose the form of a refusal (``refusal_of``)."""

    _in_head = False
    _in_body = False
    _is_refused = False
    _late_fault: HttpFault | None = None  # sent after the incomplete responses
    _num_fields = 0
    _field_bytes = 0
    _excess_bytes = 0  # the beginning of a method
    _held = b""  # the beginning of a method
    _unknown_method = ""
    _timer: asyncio.TimerHandle | None = None  # for the head, or for the wait after a refusal

    def refusal_of(self, fault: HttpFault) -> tuple[list[tuple[bytes, bytes]], bytes]:
        """Return headers and body of the response for a fault."""
        return [(b"content-type", b"text/plain; charset=utf-8")], f"{fault.message}\n".encode()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._is_refused:
            self._excess_bytes += len(data)
            if self._excess_bytes > _LINGER_BYTES:
                self.transport.abort()
            return
        view = memoryview(self._with_known_method(data))
        for start in range(0, len(view), _SLICE_BYTES):
            piece = view[start : start + _SLICE_BYTES]
            self._excess_bytes += len(piece)
            try:
                self._parse(piece)
            except httptools.HttpParserError as error:
                self._refuse(_fault_of(error))
                return
            if self.transport.is_closing() or self.transport.get_protocol() is not self:
                return
            if self._excess_bytes > MAX_HEAD_BYTES:
                what = "Trailers and lines of chunks" if self._in_body else "Headers"
                self._refuse(too_large(what))
                return
        if self.cycle is None or self.cycle.response_complete:
            self._await_head()

    def _parse(self, data: memoryview) -> None:
        while data:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                if self._should_upgrade():
                    self.handle_websocket_upgrade()
                    return
                # The parser stops at an upgrade; a new parser reads the head without the upgrade.
                head = self._head_without_upgrade()
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                self.parser.feed_data(head)
                data = data[upgrade.args[0] :]
            else:
                return

    def _with_known_method(self, data: bytes) -> bytes:
        """Replace a method that the parser does not know by a known one.

        The application answers unknown methods, as it knows the methods of each path. An incomplete
        method is held back.
        """
        if self._in_head or self._in_body:
            return data
        data = self._held + data
        end = data.find(b" ", 0, _MAX_METHOD_BYTES + 1)
        method = data[:end] if end >= 0 else data[: _MAX_METHOD_BYTES + 1]
        self._held = b""
        if method in _METHODS or not _TOKEN.fullmatch(method):
            return data
        if end < 0:
            self._held = data if len(data) <= _MAX_METHOD_BYTES else b""
            return data[len(self._held) :]
        self._unknown_method = method.decode("ascii")
        return _STAND_IN + data[end:]

    def _head_without_upgrade(self) -> bytes:
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self._version())]
        for name, value in self.headers:
            if name == b"connection":
                value = b", ".join(one for one in split(value) if one != b"upgrade")
            if value and name != b"upgrade":
                lines.append(name + b": " + value)
        return b"\r\n".join((*lines, b"", b""))

    def _version(self) -> bytes:
        return str(self.parser.get_http_version()).encode()

    def handle_websocket_upgrade(self) -> None:
        super().handle_websocket_upgrade()
        # The parser refers to this protocol. Break the cycle so that both are freed at once.
        self.parser = cast("Any", None)

    def _should_upgrade(self) -> bool:
        """Return whether the request is a WebSocket handshake.

        Other upgrades are ignored, also upgrades of requests with a body.
        """
        return (
            self._should_upgrade_to_ws()
            and self.parser.get_method() == b"GET"
            and self._version() == b"1.1"
            and tokens(self.headers, b"upgrade") == [b"websocket"]
            and all(length == b"0" for length in tokens(self.headers, b"content-length"))
            and not tokens(self.headers, b"transfer-encoding")
        )

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._num_fields = self._field_bytes = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > MAX_HEAD_BYTES:
            message = f"The target of a request is limited to {MAX_HEAD_BYTES} bytes."
            raise _FaultError(HttpFault(414, "uri_too_long", message))
        self._field_bytes = len(self.url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_fields += 1
        self._field_bytes += len(name) + len(value) + 4
        if self._num_fields > MAX_FIELDS or self._field_bytes > MAX_HEAD_BYTES:
            raise _FaultError(too_large("Headers" if self._in_head else "Trailers"))
        if self._in_head:
            super().on_header(name, value)
        # A trailer is dropped, as the checks of the head have not seen it.

    def on_headers_complete(self) -> None:
        version, method = self.parser.get_http_version(), self.parser.get_method().decode("ascii")
        fault = head_fault(version, method, self.headers)
        if fault is not None:
            raise _FaultError(fault)
        self._in_head = False
        if self.parser.should_upgrade() and not self._should_upgrade():
            return  # it is read again
        self._in_body = True
        self._num_fields = self._field_bytes = self._excess_bytes = 0
        self._stop_timer()
        super().on_headers_complete()
        if self._unknown_method:
            self.scope["method"] = self._unknown_method
            self._unknown_method = ""

    def on_body(self, body: bytes) -> None:
        # Chunk lines may take as many bytes as the chunks.
        self._excess_bytes = max(0, self._excess_bytes - 2 * len(body))
        super().on_body(body)

    def on_chunk_header(self) -> None:
        self._excess_bytes = max(0, self._excess_bytes - _CHUNK_LINES_BYTES)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._in_body = False
        self._excess_bytes = 0
        super().on_message_complete()
        if not self.parser.should_keep_alive():
            # A trailer may have requested the close. The parser then reads no further.
            self.cycle.keep_alive = False
            if self.cycle.response_complete:
                self.transport.close()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if cycle.scope["http_version"] == "1.0":
            app = partial(_without_chunks, cycle, app)
        super()._start_asgi_task(cycle, app)

    def _await_head(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(_HEAD_TIMEOUT_S, self._head_is_late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _head_is_late(self) -> None:
        if self._in_head or self._held:
            message = f"The request line and headers did not arrive within {_HEAD_TIMEOUT_S:g} s."
            self._refuse(HttpFault(408, "request_timeout", message))
        else:
            self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._late_fault is not None and self.cycle.response_complete:
            # The handler may still hold back the end of its response in this turn.
            self.loop.call_soon(self._answer, self._late_fault)

    def _refuse(self, fault: HttpFault) -> None:
        """Answer an unreadable request behind all earlier answers, and close.

        A request with a bad body gets this answer, unless its own has begun.
        """
        self._stop_timer()
        self._is_refused = True
        self._excess_bytes = 0
        cycle = self.cycle
        if self._in_body:
            is_free = not (cycle.response_started or self.pipeline)
            cycle.disconnected = True
            cycle.message_event.set()
            if is_free:
                self._answer(fault)
            else:
                self.transport.close()
        elif cycle is None or cycle.response_complete:
            self._answer(fault)
        else:
            self._late_fault = fault

    def _answer(self, fault: HttpFault) -> None:
        """Write a response and close.

        Further data of the client is discarded for a moment. An immediate close would reset the
        connection before the client has read the answer.
        """
        if self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        headers, body = self.refusal_of(fault)
        lines = [
            *self.server_state.default_headers,
            *headers,
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        head = STATUS_LINE[fault.status] + b"".join(b"%b: %b\r\n" % one for one in lines)
        self.transport.write(head + b"\r\n" + body)
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._timer = self.loop.call_later(_LINGER_S, self.transport.close)


class _FaultError(Exception):
    """Fault raised in a parser callback.

    The parser passes it on as the context of its own error.
    """

    def __init__(self, fault: HttpFault) -> None:
        super().__init__(fault.message)
        self.fault = fault


async def _without_chunks(
    cycle: RequestResponseCycle, app: Any, scope: Any, receive: Any, send: Any
) -> None:
    """Serve an HTTP/1.0 client, which does not support chunks.

    A response without a length ends with the connection.
    """
    has_length = True

    async def send_plain(event: Any) -> None:
        nonlocal has_length
        if event["type"] == "http.response.start":
            has_length = any(
                name.lower() == b"content-length" for name, _ in event.get("headers", ())
            )
            cycle.chunked_encoding = None if has_length else False
        elif not has_length:
            cycle.expected_content_length = len(event.get("body", b""))
        await send(event)

    await app(scope, receive, send_plain)


def _fault_of(error: httptools.HttpParserError) -> HttpFault:
    cause = error.__context__
    if isinstance(cause, _FaultError):
        return cause.fault
    if isinstance(cause, httptools.HttpParserInvalidURLError | UnicodeError):
        return invalid("The target of the request is not a valid path.")
    reason = str(error)
    if reason == _H2_REASON:
        return wrong_version("HTTP/2")
    if reason == _VERSION_REASON:
        return wrong_version("this version of HTTP")
    return invalid(f"The request is not valid HTTP: {reason}.")


# Interval of updates of the Date header.
_DATE_S = 1.0


class ManagedServer(uvicorn.Server):
    """Server without signal handling, which the process does itself.

    ``stop`` ends it. uvicorn polls for that ten times a second; this server wakes once a second,
    for the Date header.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Make ``serve`` close every connection and return."""
        self.should_exit = True
        self._stopping.set()

    async def main_loop(self) -> None:
        loop = asyncio.get_running_loop()
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DATE_S - loop.time() % _DATE_S):
                    await self._stopping.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals."""
        yield
