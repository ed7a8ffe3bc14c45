"""Compressed request bodies (RFC 9110, section 8.4), decoded in pieces and within bounds."""

from __future__ import annotations

import asyncio
import gzip
import sys
import zlib
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any, Protocol

from millrace.runtime.http.head import Headers, tokens
from millrace.schemas.errors import MillraceError, PayloadTooLargeError, shown

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

ACCEPTED = "gzip, deflate, zstd"
MAX_RATIO = 200
# A body up to this size may have any ratio.
_FREE_BYTES = 1024 * 1024
_PIECE_BYTES = 64 * 1024
_MAX_CODINGS = 3
_MAX_MEMBERS = 1_024  # gzip members, or zstd frames
_GZIP_WINDOW_BITS, _ZLIB_WINDOW_BITS, _RAW_WINDOW_BITS = 31, 15, -15
_ZSTD_WINDOW_LOG = 23  # 8 MiB, the senders' maximum in RFC 9659
_ZLIB_METHOD = 8
_ENCODING, _LENGTH = b"content-encoding", b"content-length"

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]


class ContentCodingError(MillraceError, code="unsupported_content_encoding", http_status=415):
    """Body with an unsupported coding. ``headers`` lists the supported codings."""

    param = "content-encoding"

    def __init__(self, why: str) -> None:
        super().__init__(f"{why} Send {ACCEPTED}, or a body without Content-Encoding.")
        self.headers = [(b"accept-encoding", ACCEPTED.encode())]


class BadCodingError(MillraceError, code="invalid_content_encoding", http_status=400):
    """Body that does not match its Content-Encoding."""

    param = "content-encoding"


class RatioError(PayloadTooLargeError, code="compression_ratio_exceeded"):
    """Body that decompresses to too many times its size."""

    param = "content-encoding"

    def __init__(self) -> None:
        MillraceError.__init__(
            self,
            f"The body decompresses to more than {MAX_RATIO} times its size and more than "
            f"{_FREE_BYTES} bytes. Send it without Content-Encoding.",
        )


def with_decoded_body(scope: Scope, receive: Receive) -> Receive:
    """Return a ``receive`` that decodes the body.

    Removes headers from ``scope`` that are no longer true.

    It raises ContentCodingError, BadCodingError and RatioError. After that, the rest of the body is
    passed on unchanged.
    """
    headers: Headers = scope["headers"]
    if not any(name == _ENCODING for name, _ in headers):
        return receive
    codings = [token for token in tokens(headers, _ENCODING) if token != b"identity"]
    if not codings:
        return receive
    scope["headers"] = [one for one in headers if one[0] not in (_ENCODING, _LENGTH)]
    return _DecodedBody(codings, receive)


class _DecodedBody:
    def __init__(self, codings: list[bytes], receive: Receive) -> None:
        self._codings = codings
        self._receive = receive
        self._stages: list[_Stage] | None = None
        self._received = _Received()
        self._pieces: Iterator[bytes] = iter(())
        self._is_over = False

    async def __call__(self) -> Event:
        if self._is_over:
            return await self._receive()
        try:
            if self._stages is None:
                self._stages = _stages(self._codings, self._received)
            while True:
                for piece in self._pieces:
                    await asyncio.sleep(0)  # other requests go on meanwhile
                    return {"type": "http.request", "body": piece, "more_body": True}
                if self._received.is_whole:
                    for stage in self._stages:
                        stage.finish()
                    self._is_over = True
                    return {"type": "http.request", "body": b"", "more_body": False}
                event = await self._receive()
                if event["type"] != "http.request":
                    return event
                body = event.get("body", b"")
                self._received.num_bytes += len(body)
                self._received.is_whole = not event.get("more_body", False)
                self._pieces = _decoded(self._stages, body)
        except MillraceError:
            self._is_over = True
            raise


class _Received:
    """Bytes received over the connection."""

    num_bytes = 0
    is_whole = False


def _decoded(stages: list[_Stage], data: bytes) -> Iterator[bytes]:
    if not stages:
        yield data
        return
    for piece in stages[0].decode(data):
        yield from _decoded(stages[1:], piece)


def _stages(codings: list[bytes], received: _Received) -> list[_Stage]:
    """Return the decoding stages, beginning with the coding that was applied last."""
    if len(codings) > _MAX_CODINGS:
        raise ContentCodingError(
            f"The body has {len(codings)} codings; {_MAX_CODINGS} are allowed."
        )
    stages = []
    for coding in reversed(codings):
        make = _CODECS.get(coding)
        if make is None:
            name = shown(coding.decode("latin-1"))
            raise ContentCodingError(f"Content-Encoding {name} is not supported.")
        stages.append(_Stage(coding.decode(), make, received))
    return stages


class _Codec(Protocol):
    """Decoder of one gzip member, zstd frame or deflate stream."""

    is_at_end: bool

    def decode(self, data: bytes) -> tuple[bytes, bytes, bool]:
        """Return a piece of output, the remaining input, and whether more output is available."""
        ...


class _Stage:
    """Decoding stage for one coding of a body."""

    def __init__(
        self, coding: str, make: Callable[[bytes], _Codec | None], received: _Received
    ) -> None:
        self._coding = coding
        self._make = make
        self._received = received
        self._codec: _Codec | None = None
        self._held = b""
        self._num_bytes = 0
        self._num_members = 0

    def decode(self, data: bytes) -> Iterator[bytes]:
        data, has_more = self._held + data, False
        self._held = b""
        while data or has_more:
            if self._codec is None:
                self._begin(data)
            if self._codec is None:
                self._held = data
                return
            try:
                piece, data, has_more = self._codec.decode(data)
            except (zlib.error, zstd.ZstdError) as error:
                raise BadCodingError(f"The body is not valid {self._coding}: {error}.") from error
            self._num_bytes += len(piece)
            if self._num_bytes > max(_FREE_BYTES, MAX_RATIO * self._received.num_bytes):
                raise RatioError
            if piece:
                yield piece
            if self._codec.is_at_end:
                self._codec, has_more = None, False

    def _begin(self, data: bytes) -> None:
        if self._num_members and self._coding == "deflate":
            raise BadCodingError("The body has data after the end of its deflate stream.")
        if self._num_members == _MAX_MEMBERS:
            raise BadCodingError(f"The body has more than {_MAX_MEMBERS} {self._coding} streams.")
        self._codec = self._make(data)
        self._num_members += self._codec is not None

    def finish(self) -> None:
        """Raise BadCodingError if the body ends too early."""
        if self._codec is not None or self._held:
            raise BadCodingError(f"The body ends before its {self._coding} data does.")


class _Zlib:
    def __init__(self, window_bits: int) -> None:
        self._inflater = zlib.decompressobj(window_bits)
        self.is_at_end = False

    def decode(self, data: bytes) -> tuple[bytes, bytes, bool]:
        piece = self._inflater.decompress(data, _PIECE_BYTES)
        self.is_at_end = self._inflater.eof
        if self.is_at_end:
            return piece, self._inflater.unused_data, False
        return piece, self._inflater.unconsumed_tail, len(piece) == _PIECE_BYTES


class _Zstd:
    def __init__(self) -> None:
        limit: dict[int, int] = {zstd.DecompressionParameter.window_log_max: _ZSTD_WINDOW_LOG}
        self._decompressor = zstd.ZstdDecompressor(options=limit)
        self.is_at_end = False

    def decode(self, data: bytes) -> tuple[bytes, bytes, bool]:
        piece = self._decompressor.decompress(data, _PIECE_BYTES)
        self.is_at_end = self._decompressor.eof
        rest = self._decompressor.unused_data if self.is_at_end else b""
        return piece, rest, not self._decompressor.needs_input


def _gzip(_data: bytes) -> _Codec | None:
    return _Zlib(_GZIP_WINDOW_BITS)


def _deflate(data: bytes) -> _Codec | None:
    """Return a decoder with or without zlib's header, which the RFC requires and some clients omit.

    None until two bytes have come.
    """
    if len(data) < 2:
        return None
    has_header = data[0] & 0x0F == _ZLIB_METHOD and (data[0] << 8 | data[1]) % 31 == 0
    return _Zlib(_ZLIB_WINDOW_BITS if has_header else _RAW_WINDOW_BITS)


def _zstd(_data: bytes) -> _Codec | None:
    return _Zstd()


_CODECS: dict[bytes, Callable[[bytes], _Codec | None]] = {
    b"gzip": _gzip,
    b"x-gzip": _gzip,
    b"deflate": _deflate,
    b"zstd": _zstd,
}


if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_GZIP_LEVEL = 4
_ZSTD_LEVEL = 3
# A body below the size of a packet gains nothing from a coding.
_MIN_BYTES = 1_024


def weight_of(headers: Headers, name: bytes, *elements: bytes) -> float:
    """Return the weight, 0 to 1, that a header gives to the first listed of ``elements``; else
    0."""
    weights: dict[bytes, float] = {}
    for token in tokens(headers, name):
        element, *parameters = (part.strip() for part in token.split(b";"))
        weights.setdefault(element, _weight(parameters))
    return next((weights[element] for element in elements if element in weights), 0.0)


def encoded(body: bytes, headers: Headers) -> tuple[bytes, str]:
    """Return ``body`` in the coding that the request prefers, with the coding's name.

    Unchanged with an empty name if no coding is accepted or a coding saves nothing.
    """
    if len(body) < _MIN_BYTES:
        return body, ""
    of_zstd = weight_of(headers, b"accept-encoding", b"zstd", b"*")
    of_gzip = weight_of(headers, b"accept-encoding", b"gzip", b"x-gzip", b"*")
    if of_zstd and of_zstd >= of_gzip:
        return zstd.compress(body, _ZSTD_LEVEL), "zstd"
    if of_gzip:
        return gzip.compress(body, _GZIP_LEVEL, mtime=0), "gzip"
    return body, ""


def _weight(parameters: list[bytes]) -> float:
    for parameter in parameters:
        name, _, value = parameter.partition(b"=")
        if name.strip() == b"q":
            try:
                weight = float(value)
            except ValueError:
                return 0.0
            return weight if 0.0 < weight <= 1.0 else 0.0
    return 1.0
