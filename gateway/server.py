"""Server based on uvicorn: sockets, protocols, and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import socket
from collections import deque
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar, cast

import uvicorn
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.datastructures import Headers as HandshakeHeaders
from websockets.exceptions import InvalidHeader
from websockets.http11 import Response
from websockets.protocol import State
from websockets.server import ServerProtocol

from millrace.gateway.api.answers import ABORT_EXTENSION
from millrace.gateway.app import build_app, token_endpoints
from millrace.gateway.batches.runner import BatchRunner
from millrace.gateway.core import Gateway
from millrace.gateway.errors import Refusal
from millrace.gateway.transport.certificate import Certificate, certificate_of
from millrace.gateway.transport.connection_writer import WRITER_EXTENSION, HttpWriter, text_frames
from millrace.gateway.transport.http import JSON, Headers, new_request_id, request_id_header
from millrace.runtime.faults.failures import keep_running
from millrace.runtime.http.head import HttpFault
from millrace.runtime.http.protocol import HttpProtocol, ManagedServer
from millrace.schemas.config import GatewayConfig
from millrace.schemas.errors import ConfigError

_CONNECTION = "connection"
_BACKLOG = 4_096
_KEEP_ALIVE_S = 75
_LAST_WORDS_S = 1.0
_LEAVING_S = 0.005
_NOTSENT_LOWAT_BYTES = 16_384
_GC_THRESHOLDS = (50_000, 50, 50)
_CLOSED = (State.CLOSING, State.CLOSED)
_VERSION_HEADER = "Sec-WebSocket-Version"
_CODES = {414: "uri_too_long", 431: "request_header_fields_too_large"}

# Callback that counts a refusal of an unknown caller.
Note = Callable[[Refusal, None], None]
_ProtocolT = TypeVar("_ProtocolT")


def listen(config: GatewayConfig) -> socket.socket:
    """Return a listening socket that other gateways may share. Raises ConfigError if it cannot be
    opened.

    Accepted sockets inherit the options: the kernel closes a stalled reader, and buffers little
    unread data.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stall_ms = round(config.client_stall_timeout_s * 1_000)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, stall_ms)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _NOTSENT_LOWAT_BYTES)
        listener.bind((config.host, config.port))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(_why_not(config, error)) from error
    return listener


def _why_not(config: GatewayConfig, error: Exception) -> str:
    where = f"{config.host}:{config.port}"
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return f"{where} is taken by another program; set gateway.port to a free port"
    return f"cannot listen on {where}: {error}"


class Server:
    """Server of a gateway on a listening socket until ``stop``; also runs its batches."""

    def __init__(self, gateway: Gateway, listener: socket.socket, *, tune: bool = True) -> None:
        """Create a server. ``tune``: set up the process's garbage collector for serving."""
        self._gateway = gateway
        self._batches = BatchRunner(gateway, token_endpoints(gateway))
        self._listener = listener
        self._tune = tune
        note = partial(gateway.refusals.note, _CONNECTION)
        config = uvicorn.Config(
            build_app(gateway),
            http=_noting(_HttpProtocol, note),
            ws=_noting(_WebSocketProtocol, note),
            ws_max_size=gateway.config.max_ws_message_bytes,
            ws_per_message_deflate=False,
            lifespan="off",
            access_log=False,
            proxy_headers=False,
            log_config=None,
            log_level="warning",
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_S,
            server_header=False,
        )
        self._certificate = certificate_of(gateway.config)
        if self._certificate is not None:
            config.load()
            config.ssl = self._certificate.context
        self._server = _GatewayServer(config)

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    @property
    def certificate(self) -> Certificate | None:
        """Return the certificate of handshakes; None without TLS."""
        return self._certificate

    @property
    def num_streams(self) -> int:
        return self._gateway.streams.num_served

    async def serve(self) -> None:
        """Start the gateway and serve until ``stop``; open streams are drained first."""
        await self._gateway.start()
        await self._batches.start()
        if self._tune:
            tune_gc()
        following = None
        if self._certificate is not None:
            follow = keep_running("certificate", self._certificate.follow, self._gateway.clock)
            following = asyncio.create_task(follow, name="certificate")
        try:
            await self._server.serve(sockets=[self._listener])
        finally:
            if following is not None:
                following.cancel()
            await self._batches.close()
            await self._gateway.close()

    async def stop(self, drain_timeout_s: float) -> None:
        """Stop accepting, wait for open streams, then close the remaining connections (1012)."""
        for server in self._server.servers:
            server.close()
        await self._gateway.drain(drain_timeout_s)
        self._server.stop()

    async def wait_started(self) -> None:
        await self._server.up.wait()


def tune_gc() -> None:
    """Exclude start-up objects from collections, and collect rarely: p99 latency needs both."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


class _GatewayServer(ManagedServer):
    """uvicorn server that sets ``up`` once it accepts. It ends when its last connection is gone,
    for which uvicorn checks ten times a second.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in (*self.servers, *(sockets or ())):
            listener.close()
        state = self.server_state
        for connection in list(state.connections):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                await asyncio.sleep(0)  # lets closed connections leave the server's sets
                while state.connections or state.tasks:  # noqa: ASYNC110  (no event to wait for)
                    await asyncio.sleep(_LEAVING_S)
        for task in state.tasks:
            task.cancel()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()


class _HttpProtocol(HttpProtocol):
    """HTTP protocol that gives handlers the transport, and answers malformed HTTP with a refusal in
    the usual shape.
    """

    _note: Note

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._writers: deque[HttpWriter] = deque()  # of requests without their whole answer

    def on_headers_complete(self) -> None:
        writer = HttpWriter(self.transport, self.flow, self.parser.get_http_version())
        extensions: dict[str, Any] = {
            ABORT_EXTENSION: self.transport.abort,
            WRITER_EXTENSION: writer,
        }
        self.scope["extensions"] = extensions
        former = self.cycle
        super().on_headers_complete()
        if self.cycle is not former:
            self._writers.append(writer)
            self.cycle.transport = cast("asyncio.Transport", writer.transport)

    def on_response_complete(self) -> None:
        self._writers.popleft()
        super().on_response_complete()

    def resume_writing(self) -> None:
        super().resume_writing()
        # Answers go out in the order of their requests.
        if self._writers and self._writers[0].on_writable is not None:
            self._writers[0].on_writable()

    def refusal_of(self, fault: HttpFault) -> tuple[Headers, bytes]:
        refusal = Refusal(status=fault.status, code=fault.code, message=fault.message)
        self._note(refusal, None)
        headers = [JSON, request_id_header(new_request_id("req")), *refusal.headers]
        return headers, refusal.body


class _SocketWriter:
    """Writer of an accepted socket."""

    def __init__(self, transport: asyncio.Transport, writable: asyncio.Event) -> None:
        self._transport = transport
        self._writable = writable
        self.on_writable: Callable[[], None] | None = None

    @property
    def is_writable(self) -> bool:
        return self._writable.is_set() and not self._transport.is_closing()

    def write(self, payloads: list[bytes]) -> None:
        self._transport.write(text_frames(payloads))


class _WebSocketProtocol(WebSocketsSansIOProtocol):
    """WebSocket protocol that queues a close frame behind unread data, instead of waiting for the
    client to read it. It distinguishes a lost connection (1006) from a close without a code (1005).
    """

    _note: Note
    _writer: _SocketWriter | None = None

    def __init__(self, config: uvicorn.Config, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        self.conn.parser.close()  # as in ``connection_lost``
        self.conn = HandshakeProtocol(
            self._note, max_size=config.ws_max_size, logger=self.conn.logger
        )

    def handle_connect(self, event: Any) -> None:
        super().handle_connect(event)
        if not self.handshake_complete:
            self._writer = _SocketWriter(self.transport, self.writable)
            extensions: dict[str, Any] = {
                **self.scope["extensions"],
                WRITER_EXTENSION: self._writer,
            }
            self.scope["extensions"] = extensions

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._writer is not None and self._writer.on_writable is not None:
            self._writer.on_writable()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.handshake_complete and self.conn.close_rcvd is None:
            self.queue.put_nowait({"type": "websocket.disconnect", "code": 1006})
        super().connection_lost(exc)
        # The generator and the connection refer to each other; clear it to spare the garbage
        # collector.
        self.conn.parser.close()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            # The refusal of a head that is too long is left unsent, and ``shutdown`` fails.
            self.handshake_complete = self.close_sent = True
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.transport.close()

    def shutdown(self) -> None:
        if self.conn.state in _CLOSED:
            self.close_sent = True  # in answer to the client's: there is no second one
        super().shutdown()

    async def send(self, message: Any) -> None:
        if message["type"] == "websocket.close":
            self.writable.set()
        await super().send(message)
        if message["type"] == "websocket.http.response.body":
            self.handshake_complete = True  # keeps a refused handshake from being logged as a bug


def _noting(protocol: type[_ProtocolT], note: Note) -> type[_ProtocolT]:
    """Return the protocol of one gateway's connections, which reports its refusals to ``note``."""
    return type(protocol.__name__, (protocol,), {"_note": staticmethod(note)})


class HandshakeProtocol(ServerProtocol):
    """WebSocket protocol of one connection. ``note`` is called for each refusal."""

    def __init__(self, note: Note, **options: Any) -> None:
        super().__init__(**options)
        self._note = note

    def reject(self, status: HTTPStatus | int, text: str) -> Response:
        """Return the response to a handshake, with ``text`` unchanged unless the handshake is
        invalid.
        """
        error = self.handshake_exc
        if error is None:
            return super().reject(status, text)
        refusal = _refusal_of(error, HTTPStatus(status).value)
        self._note(refusal, None)
        body = refusal.body
        lines = [
            JSON,
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
            request_id_header(new_request_id("req")),
            *refusal.headers,
        ]
        headers = HandshakeHeaders([(name.decode(), value.decode()) for name, value in lines])
        return Response(refusal.status, HTTPStatus(refusal.status).phrase, headers, body)


def _refusal_of(error: Exception, status: int) -> Refusal:
    header = error.name if isinstance(error, InvalidHeader) else ""
    param = header.lower() or None
    if header == _VERSION_HEADER:
        return Refusal(
            status=HTTPStatus.UPGRADE_REQUIRED.value,
            code="upgrade_required",
            message=f"This WebSocket speaks version 13 only: send {_VERSION_HEADER}: 13.",
            param=param,
            more_headers=((b"sec-websocket-version", b"13"), (b"upgrade", b"websocket")),
        )
    message = f"The WebSocket handshake is not valid: {error!s:.200}."
    code = _CODES.get(status, "invalid_handshake")
    return Refusal(status=status, code=code, message=message, param=param)
