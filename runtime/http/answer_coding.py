"""The media types and codings that a client accepts, by their weights (RFC 9110, section 12.5)."""

from __future__ import annotations

import gzip
import sys

from millrace.runtime.http.head import Headers, tokens

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_GZIP_LEVEL = 4
_ZSTD_LEVEL = 3
# Below a packet, a coding saves nothing.
_MIN_BYTES = 1_024


def weight_of(headers: Headers, name: bytes, *elements: bytes) -> float:
    """The weight, 0 to 1, that the header ``name`` gives to the first of ``elements`` that it
    lists; 0 if it lists none."""
    weights: dict[bytes, float] = {}
    for token in tokens(headers, name):
        element, *parameters = (part.strip() for part in token.split(b";"))
        weights.setdefault(element, _weight(parameters))
    return next((weights[element] for element in elements if element in weights), 0.0)


def encoded(body: bytes, headers: Headers) -> tuple[bytes, str]:
    """``body`` in the coding that the request with these ``headers`` accepts and likes best, and
    the coding's name; as it is, with an empty name, where that is none or saves nothing."""
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
