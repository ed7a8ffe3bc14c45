"""Compression of answers, and ClickHouse's compressed blocks: answers to ``compress=1`` and bodies
with ``decompress=1``.

A block has a checksum of 16 bytes, a byte for the method, the size of the block without its
checksum, the size of the data, and the compressed data.
"""

from __future__ import annotations

import struct
import sys
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import lz4.block
import lz4.frame

from millrace.runtime.http.content_coding import weight_of
from millrace.runtime.http.head import Headers
from millrace.telemetry.http.cityhash import checksum
from millrace.telemetry.store.reading import QueryError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_GZIP_WINDOW_BITS, _ZLIB_WINDOW_BITS = 31, 15
_ZLIB_LEVEL, _ZSTD_LEVEL = 3, 1


class Coding(ABC):
    """Compressor of one answer. ``name`` is its Content-Encoding, empty if the body has none."""

    name = ""

    @abstractmethod
    def encode(self, data: bytes) -> bytes:
        """Compress data; return a part of the output, the rest comes with later calls."""

    @abstractmethod
    def finish(self) -> bytes:
        """Return the rest of the output."""


class IdentityCoding(Coding):
    """Coding without compression."""

    def encode(self, data: bytes) -> bytes:
        return data

    def finish(self) -> bytes:
        return b""


class Blocks(Coding):
    """ClickHouse's compressed blocks, which are not a content coding of HTTP."""

    def __init__(self, *, with_zstd: bool) -> None:
        self._with_zstd = with_zstd

    def encode(self, data: bytes) -> bytes:
        return compressed(data, with_zstd=self._with_zstd)

    def finish(self) -> bytes:
        return b""


class _Stream(Coding):
    def __init__(self, name: str, compressor: Any, head: bytes = b"") -> None:
        self.name = name
        self._compressor = compressor
        self._head = head

    def encode(self, data: bytes) -> bytes:
        head, self._head = self._head, b""
        piece: bytes = self._compressor.compress(data)
        return head + piece

    def finish(self) -> bytes:
        rest: bytes = self._head + self._compressor.flush()
        return rest


def _lz4() -> Coding:
    compressor = lz4.frame.LZ4FrameCompressor()
    return _Stream("lz4", compressor, compressor.begin())


# In order of preference: the first coding that the client accepts is used.
_CODINGS: dict[str, Callable[[], Coding]] = {
    "lz4": _lz4,
    "zstd": lambda: _Stream("zstd", zstd.ZstdCompressor(level=_ZSTD_LEVEL)),
    "gzip": lambda: _Stream("gzip", zlib.compressobj(_ZLIB_LEVEL, wbits=_GZIP_WINDOW_BITS)),
    "deflate": lambda: _Stream("deflate", zlib.compressobj(_ZLIB_LEVEL, wbits=_ZLIB_WINDOW_BITS)),
}


def accepted_coding(headers: Headers) -> Coding:
    """Return the preferred coding of the request's Accept-Encoding; no compression if it has no
    known coding."""
    for name, make in _CODINGS.items():
        if weight_of(headers, b"accept-encoding", name.encode()):
            return make()
    return IdentityCoding()


_NONE, _LZ4, _ZSTD = 0x02, 0x82, 0x90
_HEAD = struct.Struct("<BII")
_CHECKSUM_BYTES = 16
_MAX_BLOCK_BYTES = 1024 * 1024
_CHECKSUM_DIFFERS, _CANNOT_DECOMPRESS, _UNKNOWN_METHOD, _TOO_LARGE = 40, 271, 89, 12


def compressed(data: bytes, *, with_zstd: bool = False) -> bytes:
    """Compress data into blocks. Most clients ask for LZ4."""
    blocks = []
    for start in range(0, len(data), _MAX_BLOCK_BYTES):
        piece = data[start : start + _MAX_BLOCK_BYTES]
        if with_zstd:
            method, packed = _ZSTD, zstd.compress(piece, _ZSTD_LEVEL)
        else:
            method, packed = _LZ4, lz4.block.compress(piece, store_size=False)
        block = _HEAD.pack(method, _HEAD.size + len(packed), len(piece)) + packed
        blocks += [checksum(block), block]
    return b"".join(blocks)


def decompressed(body: bytes, max_bytes: int) -> bytes:
    """Return the data of the blocks. Raises QueryError for invalid blocks, and for more than
    ``max_bytes``."""
    data = bytearray()
    at = 0
    while at < len(body):
        head = at + _CHECKSUM_BYTES
        if len(body) < head + _HEAD.size:
            raise _refuse(_CANNOT_DECOMPRESS, "the body ends within the head of a block")
        method, size, num_bytes = _HEAD.unpack_from(body, head)
        end = head + size
        if size < _HEAD.size or end > len(body):
            raise _refuse(_CANNOT_DECOMPRESS, f"a block of {size} bytes exceeds the body")
        if len(data) + num_bytes > max_bytes:
            raise _refuse(_TOO_LARGE, f"the blocks hold more than {max_bytes} bytes")
        if checksum(body[head:end]) != body[at:head]:
            raise _refuse(_CHECKSUM_DIFFERS, "the checksum of a block does not match its data")
        data += _unpacked(method, body[head + _HEAD.size : end], num_bytes)
        at = end
    return bytes(data)


def _unpacked(method: int, packed: bytes, num_bytes: int) -> bytes:
    try:
        if method == _LZ4:
            piece: bytes = lz4.block.decompress(packed, uncompressed_size=num_bytes)
        elif method == _ZSTD:
            piece = zstd.ZstdDecompressor().decompress(packed, num_bytes + 1)
        elif method == _NONE:
            piece = packed
        else:
            raise _refuse(
                _UNKNOWN_METHOD,
                f"the method {method:#04x} is not LZ4 (0x82), ZSTD (0x90) or NONE (0x02)",
            )
    except (lz4.block.LZ4BlockError, zstd.ZstdError) as error:
        raise _refuse(_CANNOT_DECOMPRESS, f"a block cannot be decompressed: {error}") from error
    if len(piece) != num_bytes:
        raise _refuse(
            _CANNOT_DECOMPRESS, f"a block does not hold the {num_bytes} bytes of its head"
        )
    return piece


def _refuse(number: int, why: str) -> QueryError:
    return QueryError.refusing(
        number, f"{why}. Send the body of decompress=1 as ClickHouse's compressed blocks."
    )
