"""What wide weights become when they are loaded, by the word of the settings."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from millrace.engine.quantization.rounding import rounded_float8, rounded_int4, rounded_int8
from millrace.engine.quantization.weight import QuantizedWeight

# Makes a quantized weight of a wide one, both [num_outputs, num_inputs].
Quantize = Callable[[torch.Tensor], QuantizedWeight]


class QuantizeAtLoad(NamedTuple):
    """How weights of layers and of the head are rounded; None: not at all."""

    layers: Quantize | None = None
    head: Quantize | None = None


# Logits bear less than layers do, so a head has 8 bits at least; its rows stay wide where those of
# the layers do.
_BY_NAME = {
    "int8": QuantizeAtLoad(rounded_int8, rounded_int8),
    "int4": QuantizeAtLoad(rounded_int4, partial(rounded_int8, rounds_rows=False)),
    "fp8": QuantizeAtLoad(rounded_float8, rounded_float8),
}


def quantize_at_load(quantization: str | None) -> QuantizeAtLoad:
    """For ``ResolvedEngineConfig.quantization``, which was checked."""
    return QuantizeAtLoad() if quantization is None else _BY_NAME[quantization]
