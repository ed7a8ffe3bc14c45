"""A connection between two hosts of a group, on which both speak in frames."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Mapping

from millrace.engine.parallel.group.remote import wire
from millrace.engine.parallel.group.remote.errors import StageError
from millrace.engine.parallel.group.remote.wire import Header, Kind
from millrace.engine.transfer.errors import PeerError
from millrace.engine.transfer.streams import Stream

_BEATS_PER_SILENCE = 5
_END_TIMEOUT_S = 0.5


class Connection:
    """One end. Whoever is heard nothing of for ``silence_s`` is taken for gone, so each end says
    something every ``beat_s``. One thread receives; any may send, and ``end``. Owns the socket,
    which ``close`` closes once no thread uses it."""

    def __init__(self, sock: socket.socket, silence_s: float) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.own_host: str = sock.getsockname()[0]
        self.peer_host, port = sock.getpeername()[:2]
        self.peer = (
            f"[{self.peer_host}]:{port}" if ":" in self.peer_host else f"{self.peer_host}:{port}"
        )
        self.limits: Mapping[Kind, int] = wire.JOINING
        self.set_silence(silence_s)
        # Two of them: a time limit belongs to one, and both sides of it are used at a time.
        self.reading = Stream(sock, silence_s)
        self._writing = Stream(sock.dup(), silence_s)
        self._lock = threading.Lock()

    def set_silence(self, silence_s: float) -> None:
        """From now on."""
        self._silence_s = silence_s
        self.beat_s = silence_s / _BEATS_PER_SILENCE

    def send(
        self, kind: Kind, body: bytes | memoryview = b"", *, at: int = 0, number: int = 0
    ) -> None:
        """A frame. Raises StageError."""
        header = wire.header(kind, len(body), at=at, number=number)
        with self._lock:
            self._writing.allow(self._silence_s)
            try:
                self._writing.send_pieces([memoryview(header), memoryview(body)])
            except PeerError as error:
                raise StageError(error.message) from error

    def receive(self) -> tuple[Header, bytes]:
        """The next frame and what is in it. Raises StageError, also if none comes in time."""
        try:
            self.reading.allow(self._silence_s)
            header = wire.parse_header(self.reading.receive(wire.HEADER_BYTES), self.limits)
            self.reading.allow(self._silence_s)
            return header, self.reading.receive(header.size)
        except PeerError as error:
            raise StageError(error.message) from error

    def end(self, why: str) -> None:
        """Say that nothing more will come, if that can be said at once; for any thread. Who
        receives here goes on until the other end has closed the connection, too: what is closed
        with something unread in it takes back what it said last."""
        if self._lock.acquire(timeout=_END_TIMEOUT_S):
            body = wire.encode_text(why)
            self._writing.allow(_END_TIMEOUT_S)
            try:
                with contextlib.suppress(PeerError):
                    self._writing.send(wire.header(Kind.END, len(body)) + body)
            finally:
                self._lock.release()
        with contextlib.suppress(OSError):
            self.reading.sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """The last of it."""
        self.reading.sock.close()
        self._writing.sock.close()
