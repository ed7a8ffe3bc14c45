"""Link of messages from one stage of a pipeline to another, through shared memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from pathlib import Path
from typing import NamedTuple

from millrace.engine.kernels.rank_view import (
    HEADER_BYTES,
    MAX_RANKS,
    RANK_SHIFT,
    TIMED_OUT,
    RanksFailedError,
    RankView,
    rank_functions,
)

# A part's length precedes it in a cache line of its own, so that parts are aligned.
_LENGTH = struct.Struct("<Q")
_ALIGNED_BYTES = 64


class LinkShape(NamedTuple):
    """Shape of a link.

    ``num_writers`` write each message together, in parts of at most ``part_bytes``; ``num_readers``
    read it. Message n is in slot n % ``num_slots``. Pages that are never written take no memory.
    """

    num_writers: int
    num_readers: int
    num_slots: int
    part_bytes: int

    @property
    def size_bytes(self) -> int:
        return HEADER_BYTES + self.num_slots * self.num_writers * self.place_bytes

    @property
    def place_bytes(self) -> int:
        """Bytes of a part with its length."""
        return _ALIGNED_BYTES * (1 - -self.part_bytes // _ALIGNED_BYTES)


def link_memory(shape: LinkShape) -> int:
    """Create an unnamed file for a link; the caller closes it.

    The file disappears with the last process that has it open or mapped. Raises ValueError for too
    many writers and readers.
    """
    if shape.num_writers + shape.num_readers > MAX_RANKS:
        raise ValueError(
            f"a link is between {MAX_RANKS} processes at most, not "
            f"{shape.num_writers + shape.num_readers}"
        )
    fd = os.memfd_create("millrace-link", os.MFD_CLOEXEC)
    os.ftruncate(fd, shape.size_bytes)
    return fd


class StageLink:
    """End of a link: its writer or reader number ``index``.

    Messages are numbered from 0 on, and an end finishes a message before it begins the next one. A
    bounded wait beyond ``timeout_s``, or any ``abort``, ends the link. Waits and later calls then
    raise RanksFailedError. Use from one thread at a time; ``abort`` may be called from any.
    """

    def __init__(
        self, library: Path, fd: int, shape: LinkShape, *, index: int, timeout_s: float
    ) -> None:
        self._library = rank_functions(library)
        self._shape = shape
        self._index = index
        pages = mmap.mmap(fd, shape.size_bytes)
        self._bytes = memoryview(pages)
        self._anchor = ctypes.c_char.from_buffer(pages)
        begin = ctypes.addressof(self._anchor)
        self._view = RankView(header=begin, timeout_ns=int(timeout_s * 1e9), size=MAX_RANKS)
        self._address = ctypes.addressof(self._view)
        self._why = "it was ended"

    @property
    def part_bytes(self) -> int:
        """Most bytes of a part."""
        return self._shape.part_bytes

    def write(self, number: int, *parts: bytes | memoryview) -> None:
        """Write this writer's part of a message, after a wait for a free slot.

        Raises ValueError if it exceeds a slot.
        """
        shape = self._shape
        size = sum(map(len, parts))
        if size > shape.part_bytes:
            raise ValueError(f"a message of {size} bytes is too long for the next stage")
        for reader in range(shape.num_readers):
            self._await(shape.num_writers + reader, number + 1 - shape.num_slots, bound=True)
        at = self._begin(number, self._index)
        _LENGTH.pack_into(self._bytes, at, size)
        at += _ALIGNED_BYTES
        for part in parts:
            self._bytes[at : at + len(part)] = part
            at += len(part)
        self._library.millrace_ranks_set_word(self._address, self._index, number + 1)

    def wait_written(self, number: int, *, bound: bool) -> None:
        """Wait until all writers have written a message; ``bound`` applies the timeout."""
        for writer in range(self._shape.num_writers):
            self._await(writer, number + 1, bound=bound)

    def part(self, number: int, writer: int = 0) -> memoryview:
        """Return a writer's part of a message, valid until ``done``."""
        begin = self._begin(number, writer)
        (size,) = _LENGTH.unpack_from(self._bytes, begin)
        begin += _ALIGNED_BYTES
        return self._bytes[begin : begin + size]

    def done(self, number: int) -> None:
        """Release a message for this reader."""
        index = self._shape.num_writers + self._index
        self._library.millrace_ranks_set_word(self._address, index, number + 1)

    def abort(self, why: str) -> None:
        """End the link with a reason; may be called from any thread."""
        self._why = why
        self._library.millrace_ranks_abort(self._address)

    def _begin(self, number: int, writer: int) -> int:
        shape = self._shape
        slot = number % shape.num_slots
        return HEADER_BYTES + (slot * shape.num_writers + writer) * shape.place_bytes

    def _await(self, word: int, value: int, *, bound: bool) -> None:
        if value <= 0:
            return
        failure = self._library.millrace_ranks_await_word(self._address, word, value, bound)
        if failure == TIMED_OUT | word << RANK_SHIFT:
            raise RanksFailedError("another stage of the pipeline did not come in time")
        if failure:
            raise RanksFailedError(self._why)
