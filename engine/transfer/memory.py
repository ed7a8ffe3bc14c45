"""Memory that another process on the machine may map, and which both can rely on."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import weakref
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from millrace.engine.transfer.errors import PeerError

# fcntl does not name it before Python 3.13: mappings that there are may write, later ones not.
_F_SEAL_FUTURE_WRITE = 0x0010
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL

# mmap does not name it before Python 3.13.
_MAP_NORESERVE = 0x4000

Blocks = npt.NDArray[np.uint8]
_SCALE_BYTES = 4


class BlockShape(NamedTuple):
    """Of an allocation for blocks, [num_layers, num_blocks, layer_bytes]: what is of a block in a
    layer is in one piece."""

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
    """Where things are in the bytes of a block in one layer: a key and a value of each of
    ``num_heads`` heads of each of ``num_tokens``, ``head_bytes`` each, and behind them, for entries
    of 8 bits, a float32 each that these are multiplied by."""

    num_tokens: int
    num_heads: int
    head_bytes: int
    has_scales: bool

    @property
    def num_vectors(self) -> int:
        """Keys and values."""
        return self.num_tokens * 2 * self.num_heads

    @property
    def data_bytes(self) -> int:
        return self.num_vectors * self.head_bytes

    @property
    def scales_at(self) -> int:
        """Where the scales begin, or would."""
        return _aligned(self.data_bytes) if self.has_scales else self.data_bytes

    @property
    def size_bytes(self) -> int:
        if not self.has_scales:
            return self.data_bytes
        return _aligned(self.scales_at + self.num_vectors * _SCALE_BYTES)

    def vectors(self, blocks: Blocks) -> list[npt.NDArray[np.uint8]]:
        """What there is for each head in blocks of [num_layers, num_blocks, size_bytes], seen in
        their memory: [num_layers, num_blocks, num_tokens, 2, num_heads, bytes] of entries and of
        scales."""
        shape = (*blocks.shape[:2], self.num_tokens, 2, self.num_heads)
        data = blocks[:, :, : self.data_bytes].reshape(*shape, self.head_bytes, copy=False)
        if not self.has_scales:
            return [data]
        end = self.scales_at + self.num_vectors * _SCALE_BYTES
        scales = blocks[:, :, self.scales_at : end].reshape(*shape, _SCALE_BYTES, copy=False)
        return [data, scales]


class SharedPages:
    """Zero pages that are taken as they are first written, in an unnamed file.

    Whoever is given ``fd`` may map them, but not write to them, nor cut the file under those who
    have: both are sealed. They go when the last process that has them has ended, however. With
    ``written_by_others`` those who map them before ``seal`` may write, too.
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
        """Those of another process that lets this one write, by its file, which this then owns."""
        pages = cls.__new__(cls)
        pages.size_bytes, pages.fd = size_bytes, fd
        weakref.finalize(pages, os.close, fd)
        pages.pages = map_pages(fd, size_bytes)
        return pages

    def seal(self) -> None:
        """From now on others may only read them."""
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)


def private_pages(size_bytes: int) -> mmap.mmap:
    """Pages of zeros that take memory as each is first written.

    Linux counts every page of a private mapping against its limits, written or not, and refuses to
    fork a process whose mapping exceeds the machine's memory. These pages are exempt.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return mmap.mmap(-1, size_bytes, flags=flags)


def map_pages(fd: int, size_bytes: int) -> mmap.mmap:
    """The pages of a file, to read and write."""
    pages = mmap.mmap(fd, size_bytes)
    with contextlib.suppress(OSError):
        # Where the system has large pages for those who ask.
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


class Region(NamedTuple):
    """Memory whose blocks are served, with the file behind it."""

    blocks: Blocks
    fd: int

    @property
    def shape(self) -> BlockShape:
        return BlockShape(*self.blocks.shape)


def map_blocks(fd: int, shape: BlockShape) -> Blocks:
    """A peer's blocks, to read. Raises PeerError unless the file is as large as that needs, and
    stays so: to read behind the end of one that was cut would end this process."""
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise PeerError("its memory may shrink")
    if os.fstat(fd).st_size < shape.size_bytes:
        raise PeerError("its memory is smaller than it says")
    pages = mmap.mmap(fd, shape.size_bytes, prot=mmap.PROT_READ)
    return np.frombuffer(pages, dtype=np.uint8).reshape(shape)


def _aligned(size_bytes: int) -> int:
    """So many bytes or a few more, so that what follows can be read 16 at a time."""
    return -(-size_bytes // 16) * 16
