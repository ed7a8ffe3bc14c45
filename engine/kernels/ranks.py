"""Exchange of numbers between ranks of a group through shared memory, see native/ranks.h."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import NamedTuple

import torch

from millrace.engine.kernels.rank_view import (
    HEADER_BYTES,
    MAX_RANKS,
    RANK_SHIFT,
    REASON,
    TIMED_OUT,
    RankView,
    rank_functions,
)
from millrace.engine.kernels.rank_view import RanksFailedError as RanksFailedError

_FLOAT_BYTES, _WORD_BYTES = 4, 64
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class RankShape:
    """Shape of a group's memory.

    It has ``message_bytes`` for rank 0's messages, and two buffers of ``buffer_bytes`` for each of
    ``size`` ranks. Pages that are never written take no memory.
    """

    def __init__(self, size: int, message_bytes: int, buffer_bytes: int) -> None:
        if not 1 <= size <= MAX_RANKS:
            raise ValueError(f"a group has 1 to {MAX_RANKS} ranks, not {size}")
        self.size = size
        self.message_bytes = _in_pages(message_bytes)
        self.buffer_bytes = _in_pages(buffer_bytes)

    @property
    def size_bytes(self) -> int:
        return HEADER_BYTES + self.message_bytes + 2 * self.size * self.buffer_bytes


def rank_memory(shape: RankShape) -> int:
    """Create an unnamed file for a group; the caller closes it.

    The file disappears with the last process that has it open or mapped.
    """
    fd = os.memfd_create("millrace-ranks", os.MFD_CLOEXEC)
    os.ftruncate(fd, shape.size_bytes)
    return fd


class RankTraffic(NamedTuple):
    """Traffic of a rank: number of exchanges, bytes (all counted as float32), and waiting time."""

    num_exchanges: int
    num_bytes: int
    waited_s: float


class SharedRanks:
    """View of a group by one rank: sums over all ranks, and messages of rank 0 to the others.

    A wait for other ranks beyond ``timeout_s``, or any ``abort``, ends the group. Waits and later
    calls then raise RanksFailedError. Use from one thread at a time; ``abort`` may be called from
    any.
    """

    def __init__(
        self, library: Path, fd: int, shape: RankShape, *, rank: int, timeout_s: float
    ) -> None:
        self.rank = rank
        self.size = shape.size
        self._library = rank_functions(library)
        self._shape = shape
        self._pages = mmap.mmap(fd, shape.size_bytes)
        self._bytes = memoryview(self._pages)
        anchor = ctypes.c_char.from_buffer(self._pages)
        begin = ctypes.addressof(anchor)
        self._anchor = anchor
        buffers_at = HEADER_BYTES + shape.message_bytes
        self._view = RankView(
            begin,
            begin + buffers_at,
            shape.buffer_bytes // _FLOAT_BYTES,
            int(timeout_s * 1e9),
            brought=0,
            waited_ns=0,
            rank=rank,
            size=shape.size,
            exchange=0,
        )
        self._num_posted = 0
        self._why = "it was ended"

    @property
    def address(self) -> int:
        """Address of ``Ranks`` for ``CpuKernels.decoder_step``, valid while this object lives."""
        return ctypes.addressof(self._view)

    @property
    def traffic(self) -> RankTraffic:
        """Traffic of this rank since it was created."""
        view = self._view
        return RankTraffic(view.exchange, _FLOAT_BYTES * view.brought, view.waited_ns / 1e9)

    def all_reduce(self, rows: torch.Tensor) -> None:
        """Replace contiguous rows by their sum over the ranks: the same bits on every rank.

        Sums are in float32, in the order of the ranks, and rounded once.
        """
        failure = self._library.millrace_ranks_all_reduce(
            self.address, _TYPES[rows.dtype], rows.data_ptr(), rows.numel()
        )
        self._raise_if(failure)

    def gather(self, columns: torch.Tensor, widths: list[int]) -> torch.Tensor | None:
        """Join all ranks' contiguous ``columns`` [num_rows, widths[rank]] on rank 0."""
        most = self._shape.buffer_bytes // (max(widths) * columns.element_size())
        pieces = [
            self._gather(columns[begin : begin + most], widths)
            for begin in range(0, len(columns), most)
        ]
        gathered = [piece for piece in pieces if piece is not None]
        return torch.cat(gathered) if gathered else None

    def _gather(self, columns: torch.Tensor, widths: list[int]) -> torch.Tensor | None:
        own = self._buffer(self.rank, columns.dtype, columns.shape[0], columns.shape[1])
        own.copy_(columns)
        parity_of_read = self._view.exchange
        self._raise_if(self._library.millrace_ranks_meet(self.address, columns.numel()))
        if self.rank:
            return None
        parts = [
            self._buffer(rank, columns.dtype, len(columns), width, parity_of_read)
            for rank, width in enumerate(widths)
        ]
        return torch.cat(parts, 1)

    def post(self, *parts: bytes | memoryview) -> None:
        """Send a message from rank 0 to all other ranks, which have received the previous one.

        Raises ValueError if it exceeds the memory.
        """
        at = HEADER_BYTES
        if sum(map(len, parts)) > self._shape.message_bytes:
            raise ValueError(f"a message of {sum(map(len, parts))} bytes is too long for a group")
        for part in parts:
            self._bytes[at : at + len(part)] = part
            at += len(part)
        self._num_posted += 1
        self._library.millrace_ranks_post(self.address, self._num_posted)

    def receive(self) -> memoryview:
        """Wait for rank 0's next message; older data may follow it.

        It is valid until the rank meets the others.
        """
        self._num_posted += 1
        self._raise_if(self._library.millrace_ranks_await(self.address, self._num_posted))
        return self._bytes[HEADER_BYTES : HEADER_BYTES + self._shape.message_bytes]

    def abort(self, why: str) -> None:
        """End the group with a reason; may be called from any thread."""
        self._why = why
        self._library.millrace_ranks_abort(self.address)

    def check(self) -> None:
        """Raise RanksFailedError if the group has ended."""
        self._raise_if(self._word(MAX_RANKS + 1))

    def _raise_if(self, failure: int) -> None:
        if failure & REASON == TIMED_OUT:
            raise RanksFailedError(
                f"rank {failure >> RANK_SHIFT} did not come to an exchange in time"
            )
        if failure:
            raise RanksFailedError(self._why)

    def _word(self, index: int) -> int:
        """Return the value of a ``RankWord`` of ranks.h."""
        return int.from_bytes(self._bytes[_WORD_BYTES * index : _WORD_BYTES * index + 4], "little")

    def _buffer(
        self,
        rank: int,
        dtype: torch.dtype,
        num_rows: int,
        width: int,
        exchange: int | None = None,
    ) -> torch.Tensor:
        parity = (self._view.exchange if exchange is None else exchange) & 1
        at = (2 * rank + parity) * self._shape.buffer_bytes
        begin = HEADER_BYTES + self._shape.message_bytes + at
        flat = torch.frombuffer(self._pages, dtype=dtype, count=num_rows * width, offset=begin)
        return flat.view(num_rows, width)


def _in_pages(size_bytes: int) -> int:
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
