"""Connection between two hosts of a group: its greeting and its frames."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import threading
from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple, TypeVar

import msgspec

from millrace.engine.parallel.control import MAX_PACKET_BYTES, Join, JoinDevices
from millrace.engine.transfer.streams import Stream
from millrace.engine.transfer.wire import PeerError
from millrace.schemas.errors import MillraceError


class StageError(MillraceError, code="stage_failed", retryable=True):
    """Failure of a connection to a stage of another host: it ended or sent an invalid frame."""


class StageRefusedError(StageError, code="stage_refused", retryable=False):
    """Refusal of one side by the other, with the remedy; a retry changes nothing."""


# Version of this protocol, of ``messages`` and of ``control``: both sides must have the same.
VERSION = 5
_MAGIC = b"mrst"
_HEADER = struct.Struct("<4sHHQQ")
HEADER_BYTES = _HEADER.size
_MAX_TEXT_BYTES = 1 << 12
_MAX_ASSIGNMENT_BYTES = 1 << 20

T = TypeVar("T", bound=msgspec.Struct)


class GroupFrameKind(IntEnum):
    """Kind of a frame.

    ``ASSIGNMENT`` tells a host that has joined what to compute. The host answers ``ACCEPTED``, or
    ``REFUSED`` with a reason. Afterwards ``MESSAGE`` is a part of a message from stage to stage,
    ``CONTROL`` a packet of a rank's socket, ``BEAT`` a heartbeat, and ``END``, with a reason, the
    last frame.
    """

    ASSIGNMENT = 1
    ACCEPTED = 2
    REFUSED = 3
    MESSAGE = 4
    CONTROL = 5
    BEAT = 6
    END = 7


JOINING: Mapping[GroupFrameKind, int] = {
    GroupFrameKind.ASSIGNMENT: _MAX_ASSIGNMENT_BYTES,
    GroupFrameKind.ACCEPTED: 0,
    GroupFrameKind.REFUSED: _MAX_TEXT_BYTES,
}
"""Kinds of frames before a host computes, with their maximum sizes in bytes."""


def computing(message_bytes: int) -> Mapping[GroupFrameKind, int]:
    """Return the kinds while a host computes; ``message_bytes`` limits a message's part."""
    return {
        GroupFrameKind.MESSAGE: message_bytes,
        GroupFrameKind.CONTROL: MAX_PACKET_BYTES,
        GroupFrameKind.BEAT: 0,
        GroupFrameKind.END: _MAX_TEXT_BYTES,
    }


class Header(NamedTuple):
    """Header of a frame.

    ``at`` is the writer or rank of a stage, ``number`` the number of a message, ``size`` the bytes
    of the body.
    """

    kind: GroupFrameKind
    at: int
    number: int
    size: int


class StageAssignment(msgspec.Struct, frozen=True, array_like=True):
    """Assignment of a host.

    ``join`` is the request to load for the first rank of its stage, with the shapes of the links on
    that host and the kind of its devices. ``fingerprint`` and ``config_digest`` identify the
    checkpoint.
    """

    join: Join | JoinDevices
    fingerprint: str
    config_digest: str


def header(kind: GroupFrameKind, size: int = 0, *, at: int = 0, number: int = 0) -> bytes:
    """Encode the header of a frame."""
    return _HEADER.pack(_MAGIC, kind, at, number, size)


def parse_header(data: bytes, limits: Mapping[GroupFrameKind, int]) -> Header:
    """Decode the header of a frame of one of the kinds in ``limits``.

    Raises StageError for another kind or a longer body.
    """
    magic, kind_number, at, number, size = _HEADER.unpack(data)
    kind = next((kind for kind in limits if kind == kind_number), None)
    if magic != _MAGIC or kind is None:
        raise StageError("it sent an invalid frame")
    if size > limits[kind]:
        raise StageError(f"it sends {size} bytes where {limits[kind]} are most")
    return Header(kind, at, number, size)


def encode(said: msgspec.Struct) -> bytes:
    """Encode ``said`` as MessagePack."""
    return msgspec.msgpack.encode(said)


def text(body: bytes | bytearray) -> str:
    """Decode the text of a frame to one line of printable characters."""
    return "".join(
        one if one.isprintable() else "?" for one in body.decode("utf-8", errors="replace")
    )


def encode_text(said: str) -> bytes:
    """Encode a text, cut to the limit of a frame."""
    return said.encode()[:_MAX_TEXT_BYTES]


def decode(body: bytes | bytearray, kind: type[T]) -> T:
    """Decode a body of type ``kind``. Raises StageError for another type."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StageError(f"it sent an invalid frame: {error}") from error


_BEATS_PER_SILENCE = 5
_END_TIMEOUT_S = 0.5


class RankConnection:
    """End of a connection; owns the socket.

    An end that is silent for ``silence_s`` counts as gone, so each end sends something every
    ``beat_s``. One thread receives; any thread may call ``send`` and ``end``. ``close`` closes the
    socket once no thread uses it.
    """

    def __init__(self, sock: socket.socket, silence_s: float) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.own_host: str = sock.getsockname()[0]
        self.peer_host, port = sock.getpeername()[:2]
        self.peer = (
            f"[{self.peer_host}]:{port}" if ":" in self.peer_host else f"{self.peer_host}:{port}"
        )
        self.limits: Mapping[GroupFrameKind, int] = JOINING
        self.set_silence(silence_s)
        # Two streams, because each has one time limit and both directions are used at a time.
        self.reading = Stream(sock, silence_s)
        self._writing = Stream(sock.dup(), silence_s)
        self._lock = threading.Lock()

    def set_silence(self, silence_s: float) -> None:
        """Set the silence that counts as an end, from now on."""
        self._silence_s = silence_s
        self.beat_s = silence_s / _BEATS_PER_SILENCE

    def send(
        self, kind: GroupFrameKind, body: bytes | memoryview = b"", *, at: int = 0, number: int = 0
    ) -> None:
        """Send a frame. Raises StageError."""
        head = header(kind, len(body), at=at, number=number)
        with self._lock:
            self._writing.allow(self._silence_s)
            try:
                self._writing.send_pieces([memoryview(head), memoryview(body)])
            except PeerError as error:
                raise StageError(error.message) from error

    def receive(self) -> tuple[Header, bytes]:
        """Return the next frame's header and body. Raises StageError, also on a timeout."""
        try:
            self.reading.allow(self._silence_s)
            head = parse_header(self.reading.receive(HEADER_BYTES), self.limits)
            self.reading.allow(self._silence_s)
            return head, self.reading.receive(head.size)
        except PeerError as error:
            raise StageError(error.message) from error

    def end(self, why: str) -> None:
        """Send the last frame if that is possible at once; may be called from any thread.

        The receiving thread continues until the other end has closed the connection, too. A socket
        closed with unread data would discard the frames sent last.
        """
        if self._lock.acquire(timeout=_END_TIMEOUT_S):
            body = encode_text(why)
            self._writing.allow(_END_TIMEOUT_S)
            try:
                with contextlib.suppress(PeerError):
                    self._writing.send(header(GroupFrameKind.END, len(body)) + body)
            finally:
                self._lock.release()
        with contextlib.suppress(OSError):
            self.reading.sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the socket."""
        self.reading.sock.close()
        self._writing.sock.close()


_HELLO = struct.Struct("<8sI32s")
_HELLO_MAGIC = b"mrstages"
_NONCE_BYTES = _PROOF_BYTES = 32
_REFUSED = bytes(_PROOF_BYTES)


def greet(stream: Stream, token: str) -> None:
    """Greet the side that this one has connected to.

    Raises StageError, or StageRefusedError for another token or version.
    """
    own = secrets.token_bytes(_NONCE_BYTES)
    try:
        stream.send(_hello(own))
        other = _nonce(stream.receive(_HELLO.size))
        stream.send(_proof(token, b"stage", own, other))
        proof = stream.receive(_PROOF_BYTES)
    except PeerError as error:
        raise StageError(error.message) from error
    if not hmac.compare_digest(proof, _proof(token, b"lead", own, other)):
        raise StageRefusedError(
            "the worker has another token. Give both sides the same token in "
            "worker.engine.stages_token, or in the file that "
            "MILLRACE_WORKER__ENGINE__STAGES_TOKEN_FILE names."
        )


def welcome(stream: Stream, token: str) -> None:
    """Greet a side that has connected to this one.

    Raises StageError if it has another token or version.
    """
    own = secrets.token_bytes(_NONCE_BYTES)
    try:
        hello = stream.receive(_HELLO.size)
        # Sent to another version, too, so that it can report the difference.
        stream.send(_hello(own))
        other = _nonce(hello)
        proof = stream.receive(_PROOF_BYTES)
        knows = hmac.compare_digest(proof, _proof(token, b"stage", other, own))
        stream.send(_proof(token, b"lead", other, own) if knows else _REFUSED)
    except PeerError as error:
        raise StageError(error.message) from error
    if not knows:
        raise StageRefusedError("it has another token: give both sides the same")


def _hello(nonce: bytes) -> bytes:
    return _HELLO.pack(_HELLO_MAGIC, VERSION, nonce)


def _nonce(hello: bytes) -> bytes:
    """Return the nonce of a hello. Raises StageRefusedError for another version or protocol."""
    magic, version, nonce = _HELLO.unpack(hello)
    if magic != _HELLO_MAGIC:
        raise StageRefusedError(
            "the address does not belong to a worker that waits for stages. Check "
            "worker.engine.stages_address."
        )
    if version != VERSION:
        raise StageRefusedError(
            f"the other side speaks version {version} of this protocol and this one {VERSION}. "
            "Run the same version of Millrace on both."
        )
    return bytes(nonce)


def _proof(token: str, role: bytes, of_stage: bytes, of_lead: bytes) -> bytes:
    """Return the proof of a role; it includes the role, so that a peer cannot replay it."""
    return hmac.digest(token.encode(), _HELLO_MAGIC + role + of_stage + of_lead, "sha256")
