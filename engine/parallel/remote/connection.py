"""A connection between two hosts of a group: its greeting, and its frames."""

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
    """The connection to a stage of another host has ended, or what came by it makes no sense."""


class StageRefusedError(StageError, code="stage_refused", retryable=False):
    """One side will not have the other, and says how to mend it: trying again changes nothing."""


# Of what is said here and in ``messages`` and ``control``: both sides have the same version.
VERSION = 4
_MAGIC = b"mrst"
_HEADER = struct.Struct("<4sHHQQ")
HEADER_BYTES = _HEADER.size
_MAX_TEXT_BYTES = 1 << 12
_MAX_ASSIGNMENT_BYTES = 1 << 20

T = TypeVar("T", bound=msgspec.Struct)


class GroupFrameKind(IntEnum):
    """What a frame is.

    ``ASSIGNMENT`` says what a host that has joined is to compute, which it has ``ACCEPTED`` or
    ``REFUSED``, with a reason. Then ``MESSAGE`` is a part of one from stage to stage, ``CONTROL``
    a packet of the socket of a rank, ``BEAT`` says that somebody is there, and ``END``, with a
    reason, that nothing will come any more.
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
"""The kinds of frames until a host computes, and how many bytes they have at most."""


def computing(message_bytes: int) -> Mapping[GroupFrameKind, int]:
    """The same from then on; ``message_bytes`` is for a part of a message."""
    return {
        GroupFrameKind.MESSAGE: message_bytes,
        GroupFrameKind.CONTROL: MAX_PACKET_BYTES,
        GroupFrameKind.BEAT: 0,
        GroupFrameKind.END: _MAX_TEXT_BYTES,
    }


class Header(NamedTuple):
    """Of a frame: ``at`` is which writer or rank of a stage, ``number`` that of a message, ``size``
    of what follows."""

    kind: GroupFrameKind
    at: int
    number: int
    size: int


class StageAssignment(msgspec.Struct, frozen=True, array_like=True):
    """What a host has of a group. ``join``: what the first rank of its stage is to load, with the
    shapes of the links of that host and the kind of its devices; ``fingerprint`` and
    ``config_digest`` are those of the checkpoint."""

    join: Join | JoinDevices
    fingerprint: str
    config_digest: str


def header(kind: GroupFrameKind, size: int = 0, *, at: int = 0, number: int = 0) -> bytes:
    """That of a frame."""
    return _HEADER.pack(_MAGIC, kind, at, number, size)


def parse_header(data: bytes, limits: Mapping[GroupFrameKind, int]) -> Header:
    """The header of a frame of one of the kinds in ``limits``. Raises StageError for any other, or
    for a longer one."""
    magic, kind_number, at, number, size = _HEADER.unpack(data)
    kind = next((kind for kind in limits if kind == kind_number), None)
    if magic != _MAGIC or kind is None:
        raise StageError("it says what makes no sense here")
    if size > limits[kind]:
        raise StageError(f"it sends {size} bytes where {limits[kind]} are most")
    return Header(kind, at, number, size)


def encode(said: msgspec.Struct) -> bytes:
    """MessagePack of it."""
    return msgspec.msgpack.encode(said)


def text(body: bytes | bytearray) -> str:
    """What a frame says in words; never more than a line of what can be printed."""
    return "".join(
        one if one.isprintable() else "?" for one in body.decode("utf-8", errors="replace")
    )


def encode_text(said: str) -> bytes:
    """The reverse, cut to what a frame may have."""
    return said.encode()[:_MAX_TEXT_BYTES]


def decode(body: bytes | bytearray, kind: type[T]) -> T:
    """Raises StageError for what is not of the kind."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StageError(f"it says what makes no sense here: {error}") from error


_BEATS_PER_SILENCE = 5
_END_TIMEOUT_S = 0.5


class RankConnection:
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
        self.limits: Mapping[GroupFrameKind, int] = JOINING
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
        self, kind: GroupFrameKind, body: bytes | memoryview = b"", *, at: int = 0, number: int = 0
    ) -> None:
        """A frame. Raises StageError."""
        head = header(kind, len(body), at=at, number=number)
        with self._lock:
            self._writing.allow(self._silence_s)
            try:
                self._writing.send_pieces([memoryview(head), memoryview(body)])
            except PeerError as error:
                raise StageError(error.message) from error

    def receive(self) -> tuple[Header, bytes]:
        """The next frame and what is in it. Raises StageError, also if none comes in time."""
        try:
            self.reading.allow(self._silence_s)
            head = parse_header(self.reading.receive(HEADER_BYTES), self.limits)
            self.reading.allow(self._silence_s)
            return head, self.reading.receive(head.size)
        except PeerError as error:
            raise StageError(error.message) from error

    def end(self, why: str) -> None:
        """Say that nothing more will come, if that can be said at once; for any thread. Who
        receives here goes on until the other end has closed the connection, too: what is closed
        with something unread in it takes back what it said last."""
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
        """The last of it."""
        self.reading.sock.close()
        self._writing.sock.close()


_HELLO = struct.Struct("<8sI32s")
_HELLO_MAGIC = b"mrstages"
_NONCE_BYTES = _PROOF_BYTES = 32
_REFUSED = bytes(_PROOF_BYTES)


def greet(stream: Stream, token: str) -> None:
    """By who connects. Raises StageError, StageRefusedError for another token or version."""
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
            "the worker there has another token: give both sides the same, in "
            "worker.engine.stages_token or a file that "
            "MILLRACE_WORKER__ENGINE__STAGES_TOKEN_FILE names."
        )


def welcome(stream: Stream, token: str) -> None:
    """By who is connected to. Raises StageError for who does not know the token, or is of another
    version."""
    own = secrets.token_bytes(_NONCE_BYTES)
    try:
        hello = stream.receive(_HELLO.size)
        # Said to another version, too, so that it can tell its user.
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
    """Raises StageRefusedError for the hello of another version, or of something else."""
    magic, version, nonce = _HELLO.unpack(hello)
    if magic != _HELLO_MAGIC:
        raise StageRefusedError(
            "what answers there is no worker that waits for stages: look at the address, "
            "worker.engine.stages_address."
        )
    if version != VERSION:
        raise StageRefusedError(
            f"the other side speaks version {version} of this protocol and this one {VERSION}: "
            "run the same version of Millrace on both."
        )
    return bytes(nonce)


def _proof(token: str, role: bytes, of_stage: bytes, of_lead: bytes) -> bytes:
    """A role in it: nobody can prove anything with what the other side has proved."""
    return hmac.digest(token.encode(), _HELLO_MAGIC + role + of_stage + of_lead, "sha256")
