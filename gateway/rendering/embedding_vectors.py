"""Conversion of pooled numbers to the requested form of embeddings."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from millrace.gateway.models import ServedModelLike
from millrace.schemas.embeddings import EmbeddingRequest
from millrace.schemas.errors import ParameterError

_BYTES_PER_NUMBER = 4


class VectorForm(NamedTuple):
    """Form of embeddings. ``dimensions`` None keeps all numbers; fewer are scaled to length 1,
    regardless of ``normalize``. ``as_base64`` selects the bytes of little-endian float32 in base64;
    otherwise an array.
    """

    dimensions: int | None
    normalize: bool
    as_base64: bool

    def encode(self, pooled: bytes) -> msgspec.Raw:
        """Return the JSON of an embedding given in little-endian float32."""
        num_all = len(pooled) // _BYTES_PER_NUMBER
        num_kept = num_all if self.dimensions is None else self.dimensions
        is_cut = num_kept < num_all
        if self.as_base64 and not (is_cut or self.normalize):
            return _quoted(pooled)
        values = struct.unpack(f"<{num_all}f", pooled)[:num_kept]
        return self.encode_numbers(_scaled(values) if is_cut or self.normalize else values)

    def encode_numbers(self, values: Sequence[float]) -> msgspec.Raw:
        """Return the JSON of numbers, unscaled."""
        if self.as_base64:
            return _quoted(struct.pack(f"<{len(values)}f", *values))
        # Nine digits distinguish all float32 values.
        return msgspec.Raw(f"[{','.join(f'{value:.9g}' for value in values)}]".encode())


def form_of(asked: EmbeddingRequest, model: ServedModelLike) -> VectorForm:
    """Return the requested form of the vectors. Raises ParameterError."""
    dimensions, size = asked.dimensions, model.embedding_size
    if dimensions is not None and not 1 <= dimensions <= size:
        raise ParameterError(
            "dimensions", f"dimensions must be between 1 and {size}, got {dimensions}"
        )
    normalize = asked.normalize
    if normalize is None:
        normalize = model.embedding_defaults.normalize
    return VectorForm(dimensions, normalize, asked.encoding_format == "base64")


def _scaled(values: tuple[float, ...]) -> tuple[float, ...]:
    """Scale to length 1; a vector of zeros stays zero."""
    length = math.hypot(*values) or 1.0
    return tuple(value / length for value in values)


def _quoted(values: bytes) -> msgspec.Raw:
    return msgspec.Raw(b'"' + base64.b64encode(values) + b'"')


def numbers_of(pooled: bytes) -> tuple[float, ...]:
    """Decode numbers from little-endian float32."""
    return struct.unpack(f"<{len(pooled) // _BYTES_PER_NUMBER}f", pooled)
