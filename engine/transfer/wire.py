"""Protocol of peers: fixed frames whose lengths are checked before anything is read.

The connecting side sends a hello, and gets an answer only if it is valid. Then the server announces
its memory (``WELCOME``, with the files), and the peer sends any number of requests:

    LEND keys           -> LENT places    the first of these blocks that exist here, and where;
                                          they stay unchanged until
    DONE                -> OVER valid     the peer has read them; not valid means too late: some
                                          of the data may be of other tokens
    LEND keys (by TCP)  -> SENT count, then for each block a checksum and its bytes, then OVER valid

A peer that reads by NIXL says so in its hello. It gets the addresses of the memory (``AGENT``) and
is lent blocks there, over any kind of connection.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from hashlib import blake2b
from hmac import compare_digest
from typing import NamedTuple

from millrace.engine.transfer.memory import BlockShape
from millrace.schemas.errors import MillraceError
from millrace.schemas.prefix import KEY_BYTES


class PeerError(MillraceError, code="kv_peer_failed", retryable=True):
    """Failure of a peer: an invalid or late answer. The requested blocks are computed instead."""


# One million tokens in blocks of 16.
MAX_KEYS = 1 << 16
MAX_REGIONS = 2
# Limit for a NIXL agent's metadata, which takes some hundred bytes per network device.
MAX_AGENT_BYTES = 1 << 16
_HELLO_MAGIC, _NIXL_MAGIC, _MAGIC = b"mrkvpeer", b"mrkvnixl", b"mrkv"
_VERSION = 1
_HELLO = struct.Struct("<8sI32s16s")
_HEADER = struct.Struct("<4sII")
_REGION = struct.Struct("<QQQ")
_COUNT, _PLACED_REGION = struct.Struct("<I"), struct.Struct("<QQQQ")
CHECKSUM = struct.Struct("<Q")
HELLO_BYTES, HEADER_BYTES = _HELLO.size, _HEADER.size
# Place of a block: its region's number, then its own number.
_REGION_SHIFT = 31
_NUMBER_MASK = (1 << _REGION_SHIFT) - 1


class TransferFrameKind(IntEnum):
    """Kind of a frame, see the module."""

    WELCOME = 1
    LEND = 2
    LENT = 3
    SENT = 4
    DONE = 5
    OVER = 6
    AGENT = 7


# Most items of each kind of frame, and bytes of an item.
_BOUNDS = {
    TransferFrameKind.WELCOME: (MAX_REGIONS, _REGION.size),
    TransferFrameKind.LEND: (MAX_KEYS, KEY_BYTES),
    TransferFrameKind.LENT: (MAX_KEYS, 4),
    TransferFrameKind.SENT: (MAX_KEYS, 0),
    TransferFrameKind.DONE: (0, 0),
    TransferFrameKind.OVER: (1, 0),
    TransferFrameKind.AGENT: (MAX_AGENT_BYTES, 1),
}


class Agent(NamedTuple):
    """Memory readable by NIXL: shapes and addresses of regions, and the agent's metadata."""

    shapes: list[BlockShape]
    addresses: list[int]
    metadata: bytes


def hello(token: str, layout: str, *, by_nixl: bool = False) -> bytes:
    """Encode the hello, the first message of the connecting side."""
    magic = _NIXL_MAGIC if by_nixl else _HELLO_MAGIC
    return _HELLO.pack(magic, _VERSION, _digest(token, 32), _digest(layout, 16))


def check_hello(data: bytes, token: str, layout: str) -> bool:
    """Check a hello; return whether the peer reads by NIXL.

    The token is compared first, in constant time. Raises PeerError for a wrong token, another
    version or another layout of blocks.
    """
    magic, version, token_digest, layout_digest = _HELLO.unpack(data)
    if not compare_digest(token_digest, _digest(token, 32)):
        raise PeerError("it has no right to read here")
    if magic not in (_HELLO_MAGIC, _NIXL_MAGIC) or version != _VERSION:
        raise PeerError("it uses another version of the protocol")
    if layout_digest != _digest(layout, 16):
        raise PeerError("its blocks are of another layout")
    return bool(magic == _NIXL_MAGIC)


def _digest(text: str, size: int) -> bytes:
    return blake2b(text.encode(), digest_size=size).digest()


def frame(kind: TransferFrameKind, count: int, body: bytes = b"") -> bytes:
    """Encode a frame with ``count`` items."""
    return _HEADER.pack(_MAGIC, kind, count) + body


def parse_header(data: bytes, *expected: TransferFrameKind) -> tuple[TransferFrameKind, int, int]:
    """Return kind, number of items and number of following bytes of a frame.

    Raises PeerError for an unexpected kind or too many items.
    """
    magic, number, count = _HEADER.unpack(data)
    kind = next((kind for kind in expected if kind == number), None)
    if magic != _MAGIC or kind is None:
        raise PeerError("it sent an invalid frame")
    most, item_bytes = _BOUNDS[kind]
    if count > most:
        raise PeerError(f"it sent a frame of {count} items, above the limit of {most}")
    return kind, count, count * item_bytes


def welcome(shapes: Sequence[BlockShape]) -> bytes:
    """Encode the regions of memory that are handed over."""
    return frame(
        TransferFrameKind.WELCOME, len(shapes), b"".join(_REGION.pack(*shape) for shape in shapes)
    )


def parse_shapes(body: bytes) -> list[BlockShape]:
    """Decode the regions of a ``WELCOME``."""
    return [BlockShape(*numbers) for numbers in _REGION.iter_unpack(body)]


def agent(said: Agent) -> bytes:
    """Encode the memory that can be read by NIXL."""
    regions = zip(said.addresses, said.shapes, strict=True)
    body = _COUNT.pack(len(said.shapes))
    body += b"".join(_PLACED_REGION.pack(address, *shape) for address, shape in regions)
    body += said.metadata
    return frame(TransferFrameKind.AGENT, len(body), body)


def parse_agent(body: bytes) -> Agent:
    """Decode an ``AGENT``. Raises PeerError."""
    count = _COUNT.unpack_from(body)[0] if len(body) >= _COUNT.size else 0
    end = _COUNT.size + count * _PLACED_REGION.size
    if not 0 < count <= MAX_REGIONS or end > len(body):
        raise PeerError("it did not announce its memory")
    regions = list(_PLACED_REGION.iter_unpack(body[_COUNT.size : end]))
    return Agent(
        [BlockShape(*shape) for _, *shape in regions],
        [address for address, *_ in regions],
        body[end:],
    )


def lend(keys: Sequence[bytes]) -> bytes:
    """Encode a request for blocks."""
    return frame(TransferFrameKind.LEND, len(keys), b"".join(keys))


def parse_keys(body: bytes) -> list[bytes]:
    """Decode the keys of a ``LEND``."""
    return [body[at : at + KEY_BYTES] for at in range(0, len(body), KEY_BYTES)]


def place(region: int, number: int) -> int:
    """Return the place of a block as one number."""
    return region << _REGION_SHIFT | number


def region_and_number(place: int) -> tuple[int, int]:
    """Split a ``place`` into region and number."""
    return place >> _REGION_SHIFT, place & _NUMBER_MASK


def lent(places: Sequence[int]) -> bytes:
    """Encode the places of lent blocks."""
    return frame(TransferFrameKind.LENT, len(places), struct.pack(f"<{len(places)}I", *places))


def parse_places(body: bytes) -> tuple[int, ...]:
    """Decode the places of a ``LENT``."""
    return struct.unpack(f"<{len(body) // 4}I", body)


def over(*, is_valid: bool) -> bytes:
    """Encode whether the blocks stayed unchanged while they were read."""
    return frame(TransferFrameKind.OVER, int(is_valid))
