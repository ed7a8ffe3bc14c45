"""Memory for blocks: its layout, copies and checksums, and pages that other processes can map."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import weakref
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

# fcntl lacks this name before Python 3.13: existing mappings may write, later ones may not.
_F_SEAL_FUTURE_WRITE = 0x0010
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL

# mmap lacks this name before Python 3.13.
_MAP_NORESERVE = 0x4000

Blocks = npt.NDArray[np.uint8]


class BlockShape(NamedTuple):
    """Shape of an allocation of blocks, [num_layers, num_blocks, layer_bytes].

    A block's bytes in a layer are contiguous.
    """

    num_layers: int
    num_blocks: int
    layer_bytes: int

    @property
    def size_bytes(self) -> int:
        return self.num_layers * self.num_blocks * self.layer_bytes

    @property
    def block_bytes(self) -> int:
        return self.num_layers * self.layer_bytes


class BlockLayout(NamedTuple):
    """Layout of a block's bytes in one layer.

    They hold a key and a value of ``head_bytes`` for each of ``num_heads`` heads of each of
    ``num_tokens``. For 8-bit entries, the scales of each key and value follow, ``scale_bytes`` for
    each; 0 if there are none.
    """

    num_tokens: int
    num_heads: int
    head_bytes: int
    scale_bytes: int

    @property
    def num_vectors(self) -> int:
        """Number of keys and values."""
        return self.num_tokens * 2 * self.num_heads

    @property
    def data_bytes(self) -> int:
        return self.num_vectors * self.head_bytes

    @property
    def scales_at(self) -> int:
        """Offset of the scales, or of the end if there are none."""
        return _aligned(self.data_bytes) if self.scale_bytes else self.data_bytes

    @property
    def size_bytes(self) -> int:
        if not self.scale_bytes:
            return self.data_bytes
        return _aligned(self.scales_end)

    @property
    def scales_end(self) -> int:
        """Offset of the end of the scales."""
        return self.scales_at + self.num_vectors * self.scale_bytes

    def vectors(self, blocks: Blocks) -> list[npt.NDArray[np.uint8]]:
        """Return views of blocks [num_layers, num_blocks, size_bytes] by head.

        Each is [num_layers, num_blocks, num_tokens, 2, num_heads, bytes], of the entries and, if
        there are any, of the scales.
        """
        shape = (*blocks.shape[:2], self.num_tokens, 2, self.num_heads)
        data = blocks[:, :, : self.data_bytes].reshape(*shape, self.head_bytes, copy=False)
        if not self.scale_bytes:
            return [data]
        scales = blocks[:, :, self.scales_at : self.scales_end]
        scales = scales.reshape(*shape, self.scale_bytes, copy=False)
        return [data, scales]


class SharedPages:
    """Zero pages in an unnamed file, allocated when first written.

    Processes that get ``fd`` can map them for reading. Seals prevent them from writing and from
    shrinking the file under other mappings. The pages are freed when the last process that maps
    them ends in any way. With ``written_by_others``, processes that map them before ``seal`` may
    write, too.
    """

    def __init__(self, size_bytes: int, *, written_by_others: bool = False) -> None:
        self.size_bytes = size_bytes
        self.fd = os.memfd_create("millrace-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.fd)
        os.ftruncate(self.fd, size_bytes)
        self.pages = map_pages(self.fd, size_bytes)
        if not written_by_others:
            self.seal()

    @classmethod
    def mapped(cls, fd: int, size_bytes: int) -> SharedPages:
        """Map another process's writable pages by its file, which this object then owns."""
        pages = cls.__new__(cls)
        pages.size_bytes, pages.fd = size_bytes, fd
        weakref.finalize(pages, os.close, fd)
        pages.pages = map_pages(fd, size_bytes)
        return pages

    def seal(self) -> None:
        """Allow new mappings to read only."""
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)


def private_pages(size_bytes: int) -> mmap.mmap:
    """Pages of zeros that take memory as each is first written.

    Linux counts every page of a private mapping against its limits, written or not, and refuses to
    fork a process whose mapping exceeds the machine's memory. These pages are exempt.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return mmap.mmap(-1, size_bytes, flags=flags)


def map_pages(fd: int, size_bytes: int) -> mmap.mmap:
    """Map the pages of a file for reading and writing."""
    pages = mmap.mmap(fd, size_bytes)
    with contextlib.suppress(OSError):
        # Request huge pages, on systems that give them on request only.
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


class Region(NamedTuple):
    """Shared memory with KV cache blocks that other workers may read, and its file descriptor."""

    blocks: Blocks
    fd: int

    @property
    def shape(self) -> BlockShape:
        return BlockShape(*self.blocks.shape)


def _aligned(size_bytes: int) -> int:
    """Round up to a multiple of 16 bytes, so that following data can be read 16 bytes at a time."""
    return -(-size_bytes // 16) * 16


def checksum_of(pieces: Iterable[memoryview]) -> int:
    """Return the 64-bit XXH3 checksum of all bytes; other threads run meanwhile."""
    checksum = xxhash.xxh3_64()
    for piece in pieces:
        checksum.update(piece)
    return checksum.intdigest()


class BlockRun(NamedTuple):
    """Run of ``length`` neighbouring blocks."""

    source: int
    target: int
    length: int


def runs_of(sources: list[int], targets: list[int]) -> list[BlockRun]:
    """Return the pairs by rising target, with runs of neighbours merged."""
    runs: list[BlockRun] = []
    for to, from_ in sorted(zip(targets, sources, strict=True)):
        if runs:
            source, target, count = runs[-1]
            if to == target + count and from_ == source + count:
                runs[-1] = BlockRun(source, target, count + 1)
                continue
        runs.append(BlockRun(from_, to, 1))
    return runs


def shares_of(runs: list[BlockRun], num_blocks: int, num_shares: int) -> list[list[BlockRun]]:
    """Split the runs into shares of about equally many blocks."""
    size = -(-num_blocks // num_shares)
    shares: list[list[BlockRun]] = [[]]
    room = size
    for run in runs:
        for part in cut(run, size, room):
            if room == 0:
                shares.append([])
                room = size
            shares[-1].append(part)
            room -= part.length
    return shares


def cut(run: BlockRun, size: int, first: int = 0) -> Iterator[BlockRun]:
    """Cut a run into pieces of at most ``size``; the first has ``first`` blocks if above 0."""
    source, target, count = run
    room = first or size
    while count:
        part = min(count, room)
        yield BlockRun(source, target, part)
        source, target, count, room = source + part, target + part, count - part, size


def copy_runs(source: Blocks, target: Blocks, runs: list[BlockRun]) -> None:
    """Copy runs of blocks in all layers."""
    for from_, to, count in runs:
        target[:, to : to + count] = source[:, from_ : from_ + count]
