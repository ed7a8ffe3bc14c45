"""Whole frames over a socket, to a deadline."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Sequence

from millrace.engine.transfer import wire
from millrace.engine.transfer.wire import PeerError

# What one call may hand to the system.
_MAX_PIECES = 512
_SEND_BYTES = 4 << 20


class PeerGoneError(PeerError, code="kv_peer_gone"):
    """The peer has closed the connection between two frames."""


class Stream:
    """A connection whose every call ends by ``deadline_s`` on the system's monotonic clock,
    whatever the peer does. Raises PeerError, also for what the system says."""

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        self.sock = sock
        self.deadline_s = 0.0
        self.allow(timeout_s)

    def allow(self, timeout_s: float) -> None:
        """Set the deadline."""
        self.deadline_s = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        """Time to the deadline. Raises PeerError once it is over."""
        left_s = self.deadline_s - time.monotonic()
        if left_s <= 0:
            raise PeerError("it takes too long")
        return left_s

    def hears(self, within_ms: int) -> bool:
        """Whether the peer says something, or ends the connection, within so long."""
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        return bool(poll.poll(within_ms))

    def receive(self, size: int, *, may_end: bool = False) -> bytes:
        """So many bytes. With ``may_end`` raises PeerGoneError if there is not even one."""
        data = bytearray(size)
        self._fill([memoryview(data)], may_end=may_end)
        return bytes(data)

    def receive_frame(
        self, *expected: wire.TransferFrameKind, may_end: bool = False
    ) -> tuple[wire.TransferFrameKind, int, bytes]:
        """Kind, number of items and body of the next frame, which is of one of those kinds."""
        header = self.receive(wire.HEADER_BYTES, may_end=may_end)
        kind, count, size = wire.parse_header(header, *expected)
        return kind, count, self.receive(size)

    def receive_into(self, pieces: Sequence[memoryview]) -> None:
        """Fill the pieces."""
        for at in range(0, len(pieces), _MAX_PIECES):
            self._fill(list(pieces[at : at + _MAX_PIECES]))

    def _fill(self, pieces: list[memoryview], *, may_end: bool = False) -> None:
        first = 0
        while first < len(pieces):
            if not pieces[first]:
                first += 1
                continue
            self.sock.settimeout(self.left_s)
            try:
                done, _, _, _ = self.sock.recvmsg_into(pieces[first:])
            except OSError as error:
                raise failed(error) from error
            if not done:
                raise (
                    PeerGoneError("it has closed the connection")
                    if may_end
                    else PeerError("it has closed the connection in the middle of a frame")
                )
            may_end = False
            first = _advance(pieces, first, done)

    def send(self, data: bytes) -> None:
        """All of it."""
        self.send_pieces([memoryview(data)])

    def send_pieces(self, pieces: Sequence[memoryview]) -> None:
        """All of them, a few megabytes a call."""
        rest, first = list(pieces), 0
        while first < len(rest):
            if not rest[first]:
                first += 1
                continue
            self.sock.settimeout(self.left_s)
            try:
                done = self.sock.sendmsg(_next_pieces(rest, first))
            except OSError as error:
                raise failed(error) from error
            first = _advance(rest, first, done)


def _next_pieces(pieces: list[memoryview], first: int) -> list[memoryview]:
    end, size = first, 0
    while end < len(pieces) and end - first < _MAX_PIECES and size < _SEND_BYTES:
        size += len(pieces[end])
        end += 1
    return pieces[first:end]


def _advance(pieces: list[memoryview], first: int, done: int) -> int:
    """The first piece that is not done after so many bytes; it is cut."""
    while done and done >= len(pieces[first]):
        done -= len(pieces[first])
        first += 1
    if done:
        pieces[first] = pieces[first][done:]
    return first


def failed(error: OSError) -> PeerError:
    """What the system said, as what is to be said of the peer."""
    if isinstance(error, TimeoutError):
        return PeerError("it takes too long")
    return PeerError(f"the connection failed: {error.strerror or error}")
