"""What peers say to each other: fixed frames whose lengths are bounded before anything is read.

Who connects sends a hello and nothing is said to it unless that is right. Then the server says what
memory it hands over (``WELCOME``, with the files), and the peer asks as often as it likes:

    LEND keys           -> LENT places    the first of them that are here, where they are; they stay
                                          as they are until
    DONE                -> OVER valid     the peer has read them; or not valid: too late, some of
                                          what it read may be of other tokens
    LEND keys (by TCP)  -> SENT count, then for each block a checksum and its bytes, then OVER valid

Who reads by NIXL says so in its hello. It hears where the memory is (``AGENT``) and is lent blocks
there, whatever the connection is.
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
    """A peer did not say what it should, or not in time; what was asked of it is computed."""


# A million tokens in blocks of 16.
MAX_KEYS = 1 << 16
MAX_REGIONS = 2
# What a NIXL agent says of itself: it has some hundred bytes for each network device.
MAX_AGENT_BYTES = 1 << 16
_HELLO_MAGIC, _NIXL_MAGIC, _MAGIC = b"mrkvpeer", b"mrkvnixl", b"mrkv"
_VERSION = 1
_HELLO = struct.Struct("<8sI32s16s")
_HEADER = struct.Struct("<4sII")
_REGION = struct.Struct("<QQQ")
_COUNT, _PLACED_REGION = struct.Struct("<I"), struct.Struct("<QQQQ")
CHECKSUM = struct.Struct("<Q")
HELLO_BYTES, HEADER_BYTES = _HELLO.size, _HEADER.size
# Where a block is: the number of its region, then its own.
_REGION_SHIFT = 31
_NUMBER_MASK = (1 << _REGION_SHIFT) - 1


class TransferFrameKind(IntEnum):
    """What a frame is; see the module."""

    WELCOME = 1
    LEND = 2
    LENT = 3
    SENT = 4
    DONE = 5
    OVER = 6
    AGENT = 7


# How many items a frame of a kind may have, and of how many bytes each.
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
    """Memory that can be read by NIXL: the regions' shapes and addresses, and what the agent that
    has registered them says of itself."""

    shapes: list[BlockShape]
    addresses: list[int]
    metadata: bytes


def hello(token: str, layout: str, *, by_nixl: bool = False) -> bytes:
    """What who connects sends first."""
    magic = _NIXL_MAGIC if by_nixl else _HELLO_MAGIC
    return _HELLO.pack(magic, _VERSION, _digest(token, 32), _digest(layout, 16))


def check_hello(data: bytes, token: str, layout: str) -> bool:
    """Raise PeerError unless it is the hello of one who knows the token, and has blocks of the
    same layout; whether it reads by NIXL. The token is compared in a time that tells nothing of
    it, and before the rest."""
    magic, version, token_digest, layout_digest = _HELLO.unpack(data)
    if not compare_digest(token_digest, _digest(token, 32)):
        raise PeerError("it has no right to read here")
    if magic not in (_HELLO_MAGIC, _NIXL_MAGIC) or version != _VERSION:
        raise PeerError("it speaks another language")
    if layout_digest != _digest(layout, 16):
        raise PeerError("its blocks are of another layout")
    return bool(magic == _NIXL_MAGIC)


def _digest(text: str, size: int) -> bytes:
    return blake2b(text.encode(), digest_size=size).digest()


def frame(kind: TransferFrameKind, count: int, body: bytes = b"") -> bytes:
    """A frame with ``count`` items."""
    return _HEADER.pack(_MAGIC, kind, count) + body


def parse_header(data: bytes, *expected: TransferFrameKind) -> tuple[TransferFrameKind, int, int]:
    """Kind and number of items of a frame, and how many bytes of them follow. Raises PeerError for
    one that is not of those expected, or longer than it may be."""
    magic, number, count = _HEADER.unpack(data)
    kind = next((kind for kind in expected if kind == number), None)
    if magic != _MAGIC or kind is None:
        raise PeerError("it says what makes no sense here")
    most, item_bytes = _BOUNDS[kind]
    if count > most:
        raise PeerError(f"it sends a frame of {count} items, but {most} are most")
    return kind, count, count * item_bytes


def welcome(shapes: Sequence[BlockShape]) -> bytes:
    """The regions of memory that are handed over."""
    return frame(
        TransferFrameKind.WELCOME, len(shapes), b"".join(_REGION.pack(*shape) for shape in shapes)
    )


def parse_shapes(body: bytes) -> list[BlockShape]:
    """The regions of a ``WELCOME``."""
    return [BlockShape(*numbers) for numbers in _REGION.iter_unpack(body)]


def agent(said: Agent) -> bytes:
    """Where memory is that can be read by NIXL."""
    regions = zip(said.addresses, said.shapes, strict=True)
    body = _COUNT.pack(len(said.shapes))
    body += b"".join(_PLACED_REGION.pack(address, *shape) for address, shape in regions)
    body += said.metadata
    return frame(TransferFrameKind.AGENT, len(body), body)


def parse_agent(body: bytes) -> Agent:
    """What an ``AGENT`` says. Raises PeerError."""
    count = _COUNT.unpack_from(body)[0] if len(body) >= _COUNT.size else 0
    end = _COUNT.size + count * _PLACED_REGION.size
    if not 0 < count <= MAX_REGIONS or end > len(body):
        raise PeerError("it does not say where its memory is")
    regions = list(_PLACED_REGION.iter_unpack(body[_COUNT.size : end]))
    return Agent(
        [BlockShape(*shape) for _, *shape in regions],
        [address for address, *_ in regions],
        body[end:],
    )


def lend(keys: Sequence[bytes]) -> bytes:
    """Ask for blocks."""
    return frame(TransferFrameKind.LEND, len(keys), b"".join(keys))


def parse_keys(body: bytes) -> list[bytes]:
    """The keys of a ``LEND``."""
    return [body[at : at + KEY_BYTES] for at in range(0, len(body), KEY_BYTES)]


def place(region: int, number: int) -> int:
    """Where a block is, in one number."""
    return region << _REGION_SHIFT | number


def region_and_number(place: int) -> tuple[int, int]:
    """The reverse of ``place``."""
    return place >> _REGION_SHIFT, place & _NUMBER_MASK


def lent(places: Sequence[int]) -> bytes:
    """Where the blocks are."""
    return frame(TransferFrameKind.LENT, len(places), struct.pack(f"<{len(places)}I", *places))


def parse_places(body: bytes) -> tuple[int, ...]:
    """The places of a ``LENT``."""
    return struct.unpack(f"<{len(body) // 4}I", body)


def over(*, is_valid: bool) -> bytes:
    """Whether the blocks stayed as they were for as long as they were read."""
    return frame(TransferFrameKind.OVER, int(is_valid))
