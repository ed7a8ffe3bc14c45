"""How an answer is compressed, as its client asks."""

from __future__ import annotations

import sys
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import lz4.frame

from millrace.runtime.http.content_coding import weight_of
from millrace.runtime.http.head import Headers
from millrace.telemetry.http.blocks import compressed

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_GZIP_WINDOW_BITS, _ZLIB_WINDOW_BITS = 31, 15
_ZLIB_LEVEL, _ZSTD_LEVEL = 3, 1


class Coding(ABC):
    """Compresses one answer. ``name`` is its Content-Encoding, empty if the body has none."""

    name = ""

    @abstractmethod
    def encode(self, data: bytes) -> bytes:
        """Some of the output; the rest comes with later calls."""

    @abstractmethod
    def finish(self) -> bytes:
        """The rest of the output."""


class IdentityCoding(Coding):
    """No compression."""

    def encode(self, data: bytes) -> bytes:
        return data

    def finish(self) -> bytes:
        return b""


class Blocks(Coding):
    """ClickHouse's compressed blocks, which are no content coding of HTTP."""

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


# In the order of preference: the first that the client takes.
_CODINGS: dict[str, Callable[[], Coding]] = {
    "lz4": _lz4,
    "zstd": lambda: _Stream("zstd", zstd.ZstdCompressor(level=_ZSTD_LEVEL)),
    "gzip": lambda: _Stream("gzip", zlib.compressobj(_ZLIB_LEVEL, wbits=_GZIP_WINDOW_BITS)),
    "deflate": lambda: _Stream("deflate", zlib.compressobj(_ZLIB_LEVEL, wbits=_ZLIB_WINDOW_BITS)),
}


def accepted_coding(headers: Headers) -> Coding:
    """The preferred coding that the request's Accept-Encoding takes; none if it takes no known
    one."""
    for name, make in _CODINGS.items():
        if weight_of(headers, b"accept-encoding", name.encode()):
            return make()
    return IdentityCoding()
