"""nats-py client with two additions: one error type for its connections, and a watchdog.

The watchdog ends a connection whose server is silent.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

import nats.errors
from nats.aio.client import DEFAULT_BUFFER_SIZE, Client, Srv
from nats.aio.transport import TcpTransport, WebSocketTransport

from millrace.runtime.clock import SystemClock, until_beat_s
from millrace.runtime.faults.connections import ConnectionErrors, bound_silence

logger = logging.getLogger(__name__)

# A server that sent nothing between two checks gets a PING. After this many checks without a byte
# the connection is closed, at most 2.5 s after the last byte. Checks are counted instead of
# seconds: a pause of this process is not the server's silence.
_LOOK_EVERY_S = 0.5
_MAX_SILENT_LOOKS = 4
# The server's machine must acknowledge sent data within this time.
_UNACKNOWLEDGED_S = 2.5
_RETRY_WAIT_S = 0.1
_clock = SystemClock()
_ERRORS = ConnectionErrors(nats.errors.Error)
_REFUSED = re.compile(r"authorization|authentication|credential|account|nonce", re.IGNORECASE)
# Error about one subject. The connection stays open.
_NO_PERMISSION = "permissions violation"


def is_refusal(message: str) -> bool:
    """Return whether a server's error refuses this client's credentials or account."""
    return bool(_REFUSED.search(message)) and _NO_PERMISSION not in message.lower()


class NoTlsError(nats.errors.Error):
    """TLS is required and the server does not offer it. No credentials were sent."""


class ClosedAtOnceError(nats.errors.Error):
    """The server closed the connection instead of greeting us."""


class _Tcp(TcpTransport):
    """TCP transport.

    ``abort`` ends it without waiting for unsent data. ``wait_closed`` returns at once after an
    abort or a failed TLS handshake, whose end asyncio never reports.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_reads = 0
        self._is_over = False

    async def connect(self, *arguments: Any, **options: Any) -> None:
        self._is_over = False
        with _ERRORS:
            await super().connect(*arguments, **options)
            assert self._io_writer is not None
            bound_silence(self._io_writer.get_extra_info("socket"), _UNACKNOWLEDGED_S)

    async def connect_tls(self, *arguments: Any, **options: Any) -> None:
        self._is_over = True
        with _ERRORS:
            await super().connect_tls(*arguments, **options)
        self._is_over = False

    def write(self, payload: bytes) -> None:
        with _ERRORS:
            super().write(payload)  # type: ignore[no-untyped-call]

    def writelines(self, payload: list[bytes]) -> None:
        with _ERRORS:
            super().writelines(payload)  # type: ignore[no-untyped-call]

    async def drain(self) -> None:
        with _ERRORS:
            await super().drain()  # type: ignore[no-untyped-call]

    async def read(self, buffer_size: int) -> bytes:
        with _ERRORS:
            data: bytes = await super().read(buffer_size)
        self.num_reads += 1
        return data

    async def readline(self) -> bytes:
        with _ERRORS:
            line: bytes = await super().readline()  # type: ignore[no-untyped-call]
        return line

    def abort(self) -> None:
        if self._io_writer is not None:
            self._is_over = True
            self._io_writer.transport.abort()

    async def wait_closed(self) -> None:
        if not self._is_over:
            await super().wait_closed()  # type: ignore[no-untyped-call]


class _WebSocket(WebSocketTransport):
    """Transport for ``ws://`` and ``wss://`` with the additions of ``_Tcp``."""

    def __init__(self) -> None:
        super().__init__()
        self.num_reads = 0

    async def connect(self, *arguments: Any, **options: Any) -> None:
        with _ERRORS:
            await super().connect(*arguments, **options)
        self._bound()

    async def connect_tls(self, *arguments: Any, **options: Any) -> None:
        with _ERRORS:
            await super().connect_tls(*arguments, **options)
        self._bound()

    def _bound(self) -> None:
        assert self._ws is not None
        bound_silence(self._ws.get_extra_info("socket"), _UNACKNOWLEDGED_S)

    async def drain(self) -> None:
        with _ERRORS:
            await super().drain()  # type: ignore[no-untyped-call]

    async def readline(self) -> bytes:
        with _ERRORS:
            data: bytes = await super().readline()  # type: ignore[no-untyped-call]
        self.num_reads += 1
        return data

    def abort(self) -> None:
        connection = None if self._ws is None else self._ws._response.connection
        if connection is not None and connection.transport is not None:
            connection.transport.abort()


class _Watchdog:
    """Watchdog that calls ``on_silence`` after ``_MAX_SILENT_LOOKS`` checks without a byte."""

    def __init__(
        self,
        num_reads: Callable[[], int],
        ask: Callable[[], Awaitable[None]],
        on_silence: Callable[[], Awaitable[None]],
    ) -> None:
        self._num_reads = num_reads
        self._ask = ask
        self._on_silence = on_silence
        self._num_seen = 0
        self._num_silent = 0
        self._timer: asyncio.TimerHandle | None = None
        self._working: asyncio.Future[None] | None = None

    def start(self) -> None:
        self.stop()
        self._num_seen, self._num_silent = self._num_reads(), 0
        self._wait()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self) -> None:
        # Use a beat that timers of this process share, so an idle process wakes up less often.
        rest_s = until_beat_s(_clock, _LOOK_EVERY_S)
        self._timer = asyncio.get_running_loop().call_later(rest_s, self._look)

    def _look(self) -> None:
        num_reads = self._num_reads()
        self._num_silent = self._num_silent + 1 if num_reads == self._num_seen else 0
        self._num_seen = num_reads
        if self._num_silent >= _MAX_SILENT_LOOKS:
            self._timer = None
            self._do(self._on_silence)
            return
        if self._num_silent and (self._working is None or self._working.done()):
            self._do(self._ask)
        self._wait()

    def _do(self, work: Callable[[], Awaitable[None]]) -> None:
        self._working = asyncio.ensure_future(_told(work()))


async def _told(work: Awaitable[None]) -> None:
    try:
        await work
    except (nats.errors.Error, OSError) as error:
        # The connection ended, which the client also notices itself.
        logger.debug("a check of the NATS connection failed", extra={"cause": repr(error)})


class SecureClient(Client):
    """NATS client that sends no credentials without required TLS, and survives refused credentials.

    Credentials expire and are replaced, so a refusal does not end the client for good. A silent
    server is noticed within 3 s. A lost connection is aborted, as its unsent data may never leave.
    Its server is tried last. No error of an attempt ends the attempts.
    """

    def __init__(self) -> None:
        super().__init__()
        self._watchdog = _Watchdog(self._count_reads, self._send_ping, self._on_silence)
        self._first_choice: Srv | None = None
        self._last_choice: Srv | None = None

    @property
    def server(self) -> Srv | None:
        """Server of the present or last connection."""
        return self._current_server

    @property
    def server_id(self) -> str:
        """Id of the server, which changes with each of its starts."""
        return str(self._server_info.get("server_id", ""))

    @property
    def other_servers(self) -> list[Srv]:
        """Configured and discovered servers except the present one."""
        return [server for server in self._server_pool if server is not self._current_server]

    @property
    def is_moving(self) -> bool:
        """True while this client is about to leave its server by ``move_to``."""
        return self._first_choice is not None

    async def move_to(self, server: Srv) -> None:
        """Move the connection to another server. Earlier messages go to the present one."""
        if self.is_connected:
            self._first_choice = server
            await self.force_reconnect()

    def abort(self) -> None:
        """End the connection without waiting for unsent data."""
        self._watchdog.stop()
        if isinstance(self._transport, _Tcp | _WebSocket):
            self._transport.abort()

    def _count_reads(self) -> int:
        transport = self._transport
        return transport.num_reads if isinstance(transport, _Tcp | _WebSocket) else 0

    async def _flush_pending(self, force_flush: bool = False) -> Any:
        """Flush, and raise a cancellation that nats-py drops while a full buffer is flushed."""
        flushed = await super()._flush_pending(force_flush)
        if force_flush and (task := asyncio.current_task()) is not None and task.cancelling():
            raise asyncio.CancelledError
        return flushed

    async def _on_silence(self) -> None:
        logger.warning("the NATS server sends nothing; the connection is closed")
        await self._process_op_err(nats.errors.StaleConnectionError())

    async def _connect_to_server(self, s: Srv) -> None:
        s.last_attempt = time.monotonic()
        self.abort()
        options = {
            "buffer_size": DEFAULT_BUFFER_SIZE,
            "connect_timeout": self.options["connect_timeout"],
        }
        if s.uri.scheme not in {"ws", "wss"}:
            self._transport = _Tcp()
            await self._transport.connect(s.uri, **options)
            return
        self._transport = _WebSocket()
        if s.uri.scheme == "wss":
            await self._transport.connect_tls(s.uri, ssl_context=self.ssl_context, **options)
        else:
            await self._transport.connect(s.uri, **options)

    async def _select_next_server(self) -> None:
        pool = self._server_pool
        if self._last_choice in pool:
            pool.append(pool.pop(pool.index(self._last_choice)))
        if self._first_choice in pool:
            pool.insert(0, pool.pop(pool.index(self._first_choice)))
        self._first_choice = self._last_choice = None
        await super()._select_next_server()

    async def _attempt_reconnect(self) -> None:
        if self.is_moving:
            self._watchdog.stop()
        else:
            self.abort()
        self._last_choice = self._current_server
        task = asyncio.current_task()
        while True:
            try:
                await super()._attempt_reconnect()
            except Exception:
                logger.exception("an attempt to reach the NATS server failed")
            if self.is_connected or self.is_closed or (task is not None and task.cancelling()):
                return
            await asyncio.sleep(_RETRY_WAIT_S)

    def _connect_command(self) -> bytes:
        uri = self._current_server.uri if self._current_server is not None else None
        demanded = "tls" in self.options or (uri is not None and uri.scheme in {"tls", "wss"})
        writer = getattr(self._transport, "_io_writer", None)
        if demanded and writer is not None and writer.get_extra_info("ssl_object") is None:
            raise NoTlsError("the server has no TLS")
        return super()._connect_command()

    async def _process_connect_init(self) -> None:
        with _ERRORS:
            await super()._process_connect_init()
        if self._status == Client.CONNECTED:
            self._watchdog.start()
            return
        # The server closed the connection without a greeting. nats-py treats that as success.
        for task in (self._reading_task, self._ping_interval_task, self._flusher_task):
            if task is not None:
                task.cancel()
        raise ClosedAtOnceError("the server closed the connection")

    async def _process_err(self, err_msg: str) -> None:
        """Reconnect after a server error. nats-py would close for good."""
        error = nats.errors.Error(f"nats: {err_msg}")
        await self._error_cb(error)
        if _NO_PERMISSION not in err_msg.lower():
            await self._process_op_err(error)
