"""From the numbers that a classification head makes to what a client is told."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

from millrace.registry.checkpoints.classifier import Activation

_BYTES_PER_NUMBER = 4


def numbers_of(pooled: bytes) -> tuple[float, ...]:
    """From little-endian float32."""
    return struct.unpack(f"<{len(pooled) // _BYTES_PER_NUMBER}f", pooled)


def activated(logits: Sequence[float], activation: Activation) -> list[float]:
    """What an activation makes of the numbers of all labels."""
    match activation:
        case Activation.NONE:
            return list(logits)
        case Activation.SIGMOID:
            return [_sigmoid(value) for value in logits]
        case Activation.SOFTMAX:
            most = max(logits)
            powers = [math.exp(value - most) for value in logits]
            total = math.fsum(powers)
            return [power / total for power in powers]


def _sigmoid(value: float) -> float:
    # The power is of a negative number, so it does not overflow.
    if value >= 0:
        return 1 / (1 + math.exp(-value))
    power = math.exp(value)
    return power / (1 + power)
