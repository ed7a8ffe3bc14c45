"""Immediate writes to a connection, past the server's awaitable ``send``: the cost per token.

An ASGI ``send`` is a task's turn of the event loop and a message built and taken apart. On the path
of tokens a connection's own protocol lends its transport instead; all else goes by ``send``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from uvicorn.protocols.http.flow_control import FlowControl

WRITER_EXTENSION = "millrace.wire"

logger = logging.getLogger(__name__)

_TEXT = 0x81  # a whole message of text, RFC 6455, section 5.2


class ConnectionWriter(Protocol):
    """Writer to a connection. ``on_writable`` is called when the client has read enough for more to
    be written.
    """

    on_writable: Callable[[], None] | None

    @property
    def is_writable(self) -> bool: ...

    def write(self, payloads: list[bytes]) -> None:
        """Write payloads; never waits. Data written while it is not writable piles up in memory."""


def text_frames(payloads: list[bytes]) -> bytes:
    """Return each payload, in UTF-8, as an unmasked WebSocket message."""
    pieces: list[bytes] = []
    for payload in payloads:
        size = len(payload)
        if size < 126:
            pieces.append(bytes((_TEXT, size)))
        elif size < 65_536:
            pieces.append(b"%c\x7e%b" % (_TEXT, size.to_bytes(2, "big")))
        else:
            pieces.append(b"%c\x7f%b" % (_TEXT, size.to_bytes(8, "big")))
        pieces.append(payload)
    return b"".join(pieces)


def chunk(payloads: list[bytes]) -> bytes:
    """Return the payloads as one chunk of a body in chunked transfer coding, RFC 9112, section
    7.1.
    """
    body = payloads[0] if len(payloads) == 1 else b"".join(payloads)
    return b"%x\r\n%b\r\n" % (len(body), body)


class CoalescedWriter(Protocol):
    """Writer that may have something to write."""

    def flush(self) -> None: ...

    def drop(self, reason: str) -> None: ...


class WriteCoalescer:
    """Coalescer of writes: calls all registered writers together in the next turn of the event
    loop, so that one message from the bus for hundreds of clients costs one turn, and wakes no
    task.
    """

    def __init__(self) -> None:
        self._waiting: list[CoalescedWriter] = []

    def schedule(self, client: CoalescedWriter) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._run)
        self._waiting.append(client)

    def _run(self) -> None:
        waiting, self._waiting = self._waiting, []
        for client in waiting:
            try:
                client.flush()
            except Exception:
                # An error of one client must not keep the others from being written to.
                logger.exception("a client could not be written to")
                client.drop("failed")


class ResponseTransport:
    """Transport of a connection as one response writes to it. Each write is a system call, which
    costs more than most of a request's work here: writes between ``hold`` and ``release`` leave in
    one call.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._held: list[bytes] | None = None

    def hold(self) -> None:
        """Buffer writes until ``release``."""
        if self._held is None:
            self._held = []

    def release(self) -> None:
        """Write the buffer, and write at once from now on."""
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
    """Writer of a response whose head was sent by ``send``, without a length, and whose end will
    be. Writes between ``hold`` and ``release`` leave in one piece: always call ``release``.

    Writers know the transport, which forgets its protocol when it closes: so nothing of a closed
    connection waits for the garbage collector.
    """

    def __init__(self, transport: asyncio.Transport, flow: FlowControl, version: str) -> None:
        """Create a writer. ``version`` is the HTTP version: a client of 1.0 knows no chunks."""
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
        """Buffer writes, also by ``send``, until ``release`` writes them in one piece."""
        self.transport.hold()

    def release(self) -> None:
        self.transport.release()
