"""Connection of the store's HTTP interface, and its close from this side."""

from __future__ import annotations

import asyncio
import socket
import struct
from functools import partial
from typing import Any

from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from millrace.runtime.http.protocol import HttpProtocol

# Seconds in which a client must take this much of a waiting answer, or all of it.
_SEND_INTERVAL_S = 30.0
_MIN_SENT_BYTES = 64 * 1024


class Protocol(HttpProtocol):
    """Protocol that closes the connection after an incomplete answer, and a connection whose client
    does not read its answer."""

    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        # Pause writing while any byte waits, so that the last bytes of an answer count too.
        transport.set_write_buffer_limits(0)
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._stop_watching()
        super().resume_writing()

    def _watch(self, waiting_bytes: int) -> None:
        self._unread = self.loop.call_later(_SEND_INTERVAL_S, self._look, waiting_bytes)

    def _look(self, before_bytes: int) -> None:
        waiting_bytes = self.transport.get_write_buffer_size()
        if before_bytes - waiting_bytes < _MIN_SENT_BYTES:
            # Reset the connection: otherwise the kernel would keep its own part of the answer.
            connected = self.transport.get_extra_info("socket")
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()
        else:
            self._watch(waiting_bytes)

    def _stop_watching(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        super()._start_asgi_task(cycle, partial(_cut_off, cycle, app))


async def _cut_off(
    cycle: RequestResponseCycle, app: Any, scope: Scope, receive: Receive, send: Send
) -> None:
    await app(scope, receive, send)
    if cycle.response_started and not cycle.response_complete:
        cycle.disconnected = True
        cycle.transport.close()
