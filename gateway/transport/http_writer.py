"""Writing a response over HTTP: by the server's ``send``, past it, and both in one piece."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from uvicorn.protocols.http.flow_control import FlowControl

from millrace.gateway.transport.connection_writer import chunk


class ResponseTransport:
    """A connection's transport as one response writes to it. Each write is a call of the kernel,
    which costs more than most of what a request does here: what is written between ``hold`` and
    ``release`` leaves by one."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._held: list[bytes] | None = None

    def hold(self) -> None:
        """Keep what is written until ``release``."""
        if self._held is None:
            self._held = []

    def release(self) -> None:
        """Write what was kept, and what comes from now on at once."""
        held, self._held = self._held, None
        if held:
            self._transport.write(b"".join(held))

    def write(self, data: bytes) -> None:
        if self._held is None:
            self._transport.write(data)
        else:
            self._held.append(data)

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self.release()
        self._transport.close()


class HttpWriter:
    """A response whose head was sent by ``send``, without a length, and whose end will be.

    Writers know the transport, which forgets its protocol when it closes: so nothing of a
    connection that is gone waits for the garbage collector.
    """

    def __init__(self, transport: asyncio.Transport, flow: FlowControl, version: str) -> None:
        """``version`` of HTTP: a client of 1.0 knows no chunks."""
        self._has_chunks = version != "1.0"
        self.transport = ResponseTransport(transport)
        self._connection = transport
        self._flow = flow
        self.on_writable: Callable[[], None] | None = None

    @property
    def is_writable(self) -> bool:
        return not (self._flow.write_paused or self._connection.is_closing())

    def write(self, payloads: list[bytes]) -> None:
        self.transport.write(chunk(payloads) if self._has_chunks else b"".join(payloads))

    def hold(self) -> None:
        """Have what is written, by ``send`` too, leave in one piece with ``release``."""
        self.transport.hold()

    def release(self) -> None:
        self.transport.release()
