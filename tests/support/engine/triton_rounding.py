"""Conversions of Triton's interpreter, made to round as the hardware does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_TORCH_TYPES = {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
}


@contextlib.contextmanager
def hardware_rounding() -> Iterator[None]:
    """Round to nearest, ties to even. The interpreter's own conversion to bfloat16 cuts the rest
    off, and that to 8 bits halves numbers whose mantissa overflows as it is rounded up."""
    own = interpreter._convert_float

    def convert(values: Any, from_: Any, to: Any, rounding: Any) -> Any:
        source, target = _TORCH_TYPES.get(from_), _TORCH_TYPES.get(to)
        if source is None or target is None:
            return own(values, from_, to, rounding)
        raw = torch.from_numpy(np.array(values, order="C", ndmin=1)).view(source)
        unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32}[target.itemsize]
        converted = raw.to(target).view(torch.uint8).numpy().view(unsigned)
        return converted.reshape(np.shape(values))

    with mock.patch.object(interpreter, "_convert_float", convert):
        yield
