"""Frames over a socket, with a deadline."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Sequence

from millrace.engine.transfer import wire
from millrace.engine.transfer.wire import PeerError

# Limits of one system call.
_MAX_PIECES = 512
_SEND_BYTES = 4 << 20


class PeerGoneError(PeerError, code="kv_peer_gone"):
    """End of the connection by the peer between two frames."""


class Stream:
    """Connection of which every call ends by ``deadline_s`` on the system's monotonic clock.

    Raises PeerError, also for the system's errors.
    """

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        self.sock = sock
        self.deadline_s = 0.0
        self.allow(timeout_s)

    def allow(self, timeout_s: float) -> None:
        """Set the deadline."""
        self.deadline_s = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        """Seconds to the deadline. Raises PeerError once it has passed."""
        left_s = self.deadline_s - time.monotonic()
        if left_s <= 0:
            raise PeerError("it takes too long")
        return left_s

    def hears(self, within_ms: int) -> bool:
        """Return whether the peer sends something or closes the connection within ``within_ms``."""
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        return bool(poll.poll(within_ms))

    def receive(self, size: int, *, may_end: bool = False) -> bytes:
        """Return ``size`` bytes.

        With ``may_end``, raises PeerGoneError if the end comes before any.
        """
        data = bytearray(size)
        self._fill([memoryview(data)], may_end=may_end)
        return bytes(data)

    def receive_frame(
        self, *expected: wire.TransferFrameKind, may_end: bool = False
    ) -> tuple[wire.TransferFrameKind, int, bytes]:
        """Return kind, number of items and body of the next frame, which must be an expected
        one.
        """
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
        """Send all of ``data``."""
        self.send_pieces([memoryview(data)])

    def send_pieces(self, pieces: Sequence[memoryview]) -> None:
        """Send all pieces, a few megabytes per call."""
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
    """Skip ``done`` bytes, cut the piece at that point, and return its index."""
    while done and done >= len(pieces[first]):
        done -= len(pieces[first])
        first += 1
    if done:
        pieces[first] = pieces[first][done:]
    return first


def failed(error: OSError) -> PeerError:
    """Convert an error of the system to the error of the peer."""
    if isinstance(error, TimeoutError):
        return PeerError("it takes too long")
    return PeerError(f"the connection failed: {error.strerror or error}")
