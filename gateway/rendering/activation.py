"""From the numbers that a classification head makes to what a client is told."""

from __future__ import annotations

import struct

_BYTES_PER_NUMBER = 4


def numbers_of(pooled: bytes) -> tuple[float, ...]:
    """From little-endian float32."""
    return struct.unpack(f"<{len(pooled) // _BYTES_PER_NUMBER}f", pooled)
