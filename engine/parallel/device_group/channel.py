"""The way of messages from rank 0 to the others."""

from __future__ import annotations

import itertools
import struct
from typing import Protocol

from millrace.engine.kernels.stage_link import LinkShape, StageLink

# How far rank 0 may be ahead of the host of another rank; and what most messages fit into, longer
# ones go in several pieces.
_NUM_SLOTS, _PIECE_BYTES = 8, 1 << 20
_LENGTH = struct.Struct("=Q")


class Channel(Protocol):
    """Of one rank. Raises RanksFailedError once the group has failed."""

    def post(self, *parts: bytes | memoryview) -> None:
        """Say something to all other ranks: by rank 0."""

    def receive(self) -> memoryview:
        """What rank 0 says next, however long that takes; a copy. There may be something behind
        it."""

    def abort(self, why: str) -> None:
        """Have it fail; for any thread."""


def link_shape(num_readers: int) -> LinkShape:
    """Of the link from rank 0 to those of one host that it tells what to compute."""
    return LinkShape(1, num_readers, _NUM_SLOTS, _PIECE_BYTES)


class LinkChannel:
    """By memory that all of them map."""

    def __init__(self, link: StageLink) -> None:
        self._link = link
        self._numbers = itertools.count()

    def post(self, *parts: bytes | memoryview) -> None:
        whole = b"".join(parts)
        room = _PIECE_BYTES - _LENGTH.size
        for begin in range(0, max(1, len(whole)), room):
            # Each piece says how much is left, with itself.
            left = _LENGTH.pack(len(whole) - begin)
            self._link.write(next(self._numbers), left, whole[begin : begin + room])

    def receive(self) -> memoryview:
        pieces: list[bytes] = []
        while True:
            number = next(self._numbers)
            self._link.wait_written(number, bound=False)
            part = self._link.part(number)
            [left] = _LENGTH.unpack_from(part)
            own = part[_LENGTH.size : _LENGTH.size + left]
            pieces.append(bytes(own))
            self._link.done(number)
            if len(own) == left:
                return memoryview(bytearray().join(pieces))

    def abort(self, why: str) -> None:
        self._link.abort(why)
