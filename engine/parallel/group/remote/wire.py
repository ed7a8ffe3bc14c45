"""Frames between the hosts of a group: a header of fixed size, which bounds what follows before it
is read, and MessagePack or the bytes of a step behind it."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple, TypeVar

import msgspec

from millrace.engine.parallel.group.control_wire import MAX_PACKET_BYTES, Join, JoinDevices
from millrace.engine.parallel.group.remote.errors import StageError

# Of what is said here and of ``step_wire`` and ``control_wire``: both sides have the same.
VERSION = 3
_MAGIC = b"mrst"
_HEADER = struct.Struct("<4sHHQQ")
HEADER_BYTES = _HEADER.size
_MAX_TEXT_BYTES = 1 << 12
_MAX_ASSIGNMENT_BYTES = 1 << 20

T = TypeVar("T", bound=msgspec.Struct)


class Kind(IntEnum):
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


JOINING: Mapping[Kind, int] = {
    Kind.ASSIGNMENT: _MAX_ASSIGNMENT_BYTES,
    Kind.ACCEPTED: 0,
    Kind.REFUSED: _MAX_TEXT_BYTES,
}
"""The kinds of frames until a host computes, and how many bytes they have at most."""


def computing(message_bytes: int) -> Mapping[Kind, int]:
    """The same from then on; ``message_bytes`` is for a part of a message."""
    return {
        Kind.MESSAGE: message_bytes,
        Kind.CONTROL: MAX_PACKET_BYTES,
        Kind.BEAT: 0,
        Kind.END: _MAX_TEXT_BYTES,
    }


class Header(NamedTuple):
    """Of a frame: ``at`` is which writer or rank of a stage, ``number`` that of a message, ``size``
    of what follows."""

    kind: Kind
    at: int
    number: int
    size: int


class Assignment(msgspec.Struct, frozen=True, array_like=True):
    """What a host has of a group. ``join``: what the first rank of its stage is to load, with the
    shapes of the links of that host and the kind of its devices; ``fingerprint`` and
    ``config_digest`` are those of the checkpoint."""

    join: Join | JoinDevices
    fingerprint: str
    config_digest: str


def header(kind: Kind, size: int = 0, *, at: int = 0, number: int = 0) -> bytes:
    """That of a frame."""
    return _HEADER.pack(_MAGIC, kind, at, number, size)


def parse_header(data: bytes, limits: Mapping[Kind, int]) -> Header:
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
