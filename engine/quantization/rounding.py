"""Quantization of a wide weight by rounding alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from millrace.engine.quantization.weight import Activations, QuantizedWeight

GROUP_INPUTS = 128
# Depth of the tiles of the kernels for packed weights, in inputs.
GROUP_STEP = 32
_MOST_INT8, _MOST_FLOAT8 = 127.0, 448.0
_LEAST_INT4, _MOST_INT4 = -8, 7
# Least ratio of a candidate scale to the scale that clips nothing, and the number of candidates.
# Groups of normally distributed weights have their least error near 0.85.
_LEAST_RATIO, _NUM_RATIOS = 0.5, 20


def rounded_int8(
    weight: torch.Tensor, *, scale_dtype: torch.dtype = torch.float32, rounds_rows: bool = True
) -> QuantizedWeight:
    """Round ``weight`` [num_outputs, num_inputs] to int8, symmetric with one scale per output.

    A scale is the largest magnitude over 127. Rows are rounded to int8, too, or stay wide if not
    ``rounds_rows``. ``scale_dtype`` is the dtype in which scales will be stored; codes are made for
    scales rounded to it.
    """
    values = weight.float()
    scales = storable(values.abs().amax(1, keepdim=True) / _MOST_INT8, scale_dtype)
    codes = (values / scales).round().clamp(-_MOST_INT8, _MOST_INT8).to(torch.int8)
    activations = Activations.INT8_TOKEN if rounds_rows else Activations.WIDE
    return QuantizedWeight(codes, scales, group_inputs=weight.shape[1], activations=activations)


def rounded_float8(
    weight: torch.Tensor, *, scale_dtype: torch.dtype = torch.float32
) -> QuantizedWeight:
    """Round ``weight`` [num_outputs, num_inputs] to float8_e4m3fn with one scale per output.

    A scale is the largest magnitude over 448. Rows are rounded to float8, too. ``scale_dtype``: see
    ``rounded_int8``.
    """
    values = weight.float()
    scales = storable(values.abs().amax(1, keepdim=True) / _MOST_FLOAT8, scale_dtype)
    codes = (values / scales).clamp(-_MOST_FLOAT8, _MOST_FLOAT8).to(torch.float8_e4m3fn)
    return QuantizedWeight(
        codes, scales, group_inputs=weight.shape[1], activations=Activations.FLOAT8_TOKEN
    )


def rounded_int4(
    weight: torch.Tensor,
    *,
    group_inputs: int = GROUP_INPUTS,
    symmetric: bool = True,
    scale_dtype: torch.dtype = torch.float32,
) -> QuantizedWeight:
    """Round ``weight`` [num_outputs, num_inputs] to int4 by groups of inputs; rows stay wide.

    Each group of ``fitting_group(num_inputs, group_inputs)`` inputs has a scale and, if not
    ``symmetric``, a zero point. Of the scales that clip nothing or a part, it gets the one with the
    least sum of squared errors. ``scale_dtype``: see ``rounded_int8``.
    """
    size = fitting_group(weight.shape[1], group_inputs)
    groups = weight.float().reshape(len(weight), -1, size)
    scales, zeros = int4_scales(groups, symmetric=symmetric, scale_dtype=scale_dtype)
    codes = int4_codes(groups, scales, zeros).flatten(1)
    return QuantizedWeight(
        codes.to(torch.int8),
        scales.squeeze(-1),
        group_inputs=size,
        bits=4,
        zeros=None if symmetric else zeros.squeeze(-1).to(torch.int16),
    )


def fitting_group(num_inputs: int, wanted: int) -> int:
    """Return the number of inputs that share a scale.

    It is ``wanted`` if that divides ``num_inputs``, else the largest smaller multiple of 32 that
    does, else all inputs (one scale per output).
    """
    if num_inputs % wanted == 0:
        return wanted
    smaller = range(wanted - wanted % GROUP_STEP, 0, -GROUP_STEP)
    return next((size for size in smaller if num_inputs % size == 0), num_inputs)


def int4_scales(
    groups: torch.Tensor,
    *,
    symmetric: bool = True,
    scale_dtype: torch.dtype = torch.float32,
    importance: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and zero points, float32 [num_outputs, num_groups, 1], with the least error.

    ``groups`` is float32 [num_outputs, num_groups, group_inputs]. The error is the sum of squares,
    weighted by ``importance`` [num_groups, group_inputs] if given.
    """
    if symmetric:
        high = groups.abs().amax(-1, keepdim=True)
        low = -high
        widest = high / _MOST_INT4
    else:
        high = groups.amax(-1, keepdim=True).clamp(min=0)
        low = groups.amin(-1, keepdim=True).clamp(max=0)
        widest = (high - low) / (_MOST_INT4 - _LEAST_INT4)
    best_scales, best_zeros = torch.ones_like(widest), torch.zeros_like(widest)
    least = torch.full_like(widest, torch.inf)
    for ratio in torch.linspace(1.0, _LEAST_RATIO, _NUM_RATIOS).tolist():
        scales = storable(widest * ratio, scale_dtype)
        zeros = torch.zeros_like(scales)
        if not symmetric:
            # Map the middle of the codes' range to the middle of the group's values.
            zeros = ((_LEAST_INT4 + _MOST_INT4) / 2 - (low + high) / 2 / scales).round()
            zeros = zeros.clamp(_LEAST_INT4, _MOST_INT4)
        errors = (groups - (int4_codes(groups, scales, zeros) - zeros) * scales).square()
        if importance is not None:
            errors *= importance
        total = errors.sum(-1, keepdim=True)
        better = total < least
        least = torch.where(better, total, least)
        best_scales = torch.where(better, scales, best_scales)
        best_zeros = torch.where(better, zeros, best_zeros)
    return best_scales, best_zeros


def int4_codes(
    values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | float = 0.0
) -> torch.Tensor:
    """Return the nearest codes, whole numbers from -8 to 7 in float32, shaped as ``values``."""
    return (values / scales + zeros).round().clamp(_LEAST_INT4, _MOST_INT4)


def storable(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``scales`` rounded to ``dtype``, in float32.

    A scale of 0, which scales zeros only, becomes 1. A scale too small for the dtype becomes its
    smallest normal number.
    """
    stored = scales.to(dtype).float().clamp(min=torch.finfo(dtype).smallest_normal)
    return torch.where(scales == 0, 1.0, stored)


# Maker of a quantized weight from a wide one, both [num_outputs, num_inputs].
Quantize = Callable[[torch.Tensor], QuantizedWeight]


class QuantizeAtLoad(NamedTuple):
    """Rounding of the weights of layers and of the head; None for no rounding."""

    layers: Quantize | None = None
    head: Quantize | None = None


# Logits tolerate less rounding than layers, so a head has at least 8 bits. Its rows stay wide if
# the layers' rows do.
_BY_NAME = {
    "int8": QuantizeAtLoad(rounded_int8, rounded_int8),
    "int4": QuantizeAtLoad(rounded_int4, partial(rounded_int8, rounds_rows=False)),
    "fp8": QuantizeAtLoad(rounded_float8, rounded_float8),
}


def quantize_at_load(quantization: str | None) -> QuantizeAtLoad:
    """Return the rounding for a checked ``ResolvedEngineConfig.quantization``."""
    return QuantizeAtLoad() if quantization is None else _BY_NAME[quantization]
