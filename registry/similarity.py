"""Similarity of two embeddings."""

from __future__ import annotations

import math
import struct
from typing import NamedTuple

_BYTES_PER_NUMBER = 4


class Vector(NamedTuple):
    """Embedding with its length."""

    values: tuple[float, ...]
    length: float

    @classmethod
    def of(cls, pooled: bytes) -> Vector:
        """Create a vector from little-endian float32."""
        values = struct.unpack(f"<{len(pooled) // _BYTES_PER_NUMBER}f", pooled)
        return cls(values, math.hypot(*values))


def cosine(one: Vector, other: Vector) -> float:
    """Return the cosine of the angle between two vectors, -1 to 1; 0 if one of them is all zeros.

    It uses the law of cosines, since distances and lengths are computed without a loop in Python.
    """
    if not (one.length and other.length):
        return 0.0
    distance = math.dist(one.values, other.values)
    product = one.length * other.length
    found = (one.length**2 + other.length**2 - distance**2) / (2 * product)
    return max(-1.0, min(1.0, found))
