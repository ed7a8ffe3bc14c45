"""Quantization of a wide weight by rounding alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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

# Inputs that share a scale in weights for rows of int16, and elements that are rounded at a time.
_SMALL_GROUP, _SLAB = 32, 1 << 17
# Numbers of steps into which candidates divide a group's range, beside the 15 between 16 codes.
_STEPS = (13.5, 14.0, 14.25, 14.5, 14.75, 15.0, 15.25, 15.5, 16.0)
# Least scale that half precision stores with six bits, and the share of scales below it, whose
# groups hardly add to a product, at which it is not used.
_LEAST_HALF, _MOST_HALF, _MOST_SMALL = 2.0**-18, 65504.0, 0.01


def rounded_int8(
    weight: torch.Tensor, *, scale_dtype: torch.dtype = torch.float32
) -> QuantizedWeight:
    """Round ``weight`` [num_outputs, num_inputs] to int8, symmetric with one scale per output.

    A scale is the largest magnitude over 127. Rows are rounded to int8, too. ``scale_dtype`` is the
    dtype in which scales will be stored; codes are made for scales rounded to it.
    """
    values = weight.float()
    scales = storable(values.abs().amax(1, keepdim=True) / _MOST_INT8, scale_dtype)
    codes = (values / scales).round().clamp(-_MOST_INT8, _MOST_INT8).to(torch.int8)
    return QuantizedWeight(
        codes, scales, group_inputs=weight.shape[1], activations=Activations.INT8_TOKEN
    )


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


def rounded_int8_groups(weight: torch.Tensor) -> QuantizedWeight:
    """Round ``weight`` [num_outputs, num_inputs] to int8, symmetric with a scale per 32 inputs.

    A scale is the largest magnitude over 127, in half precision if that holds the scales. Rows are
    rounded to int16. Inputs that are no multiple of 32 are rounded by ``rounded_int8``.
    """
    if weight.shape[1] % _SMALL_GROUP:
        return rounded_int8(weight)
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    largest = weight.reshape(len(weight), -1, _SMALL_GROUP).abs().amax(-1, keepdim=True).float()
    scales = _stored(largest / _MOST_INT8, _dtype_of(largest / _MOST_INT8))
    for part, own, to in _slabs(weight, scales, codes):
        rounded = (part / own).round_().clamp_(-_MOST_INT8, _MOST_INT8)
        to.copy_(rounded.flatten(1))
    return QuantizedWeight(
        codes,
        scales.squeeze(-1),
        group_inputs=_SMALL_GROUP,
        activations=Activations.INT16_GROUP,
    )


def rounded_int4_groups(weight: torch.Tensor) -> QuantizedWeight:
    """Round ``weight`` [num_outputs, num_inputs] to int4 with a scale and an offset per 32 inputs.

    They are the weighted least squares fit to the codes of one of several candidates: that with the
    least error. Large weights weigh more, because their errors change outputs more. Scales and
    offsets are in half precision if that holds them. Rows are rounded to int16. Inputs that are no
    multiple of 32 are rounded by ``rounded_int4``.
    """
    if weight.shape[1] % _SMALL_GROUP:
        return rounded_int4(weight)
    shape = (len(weight), weight.shape[1] // _SMALL_GROUP, 1)
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(shape, device=weight.device)
    offsets = torch.empty_like(scales)
    for part, *fitted in _slabs(weight, scales, offsets):
        for to, made in zip(fitted, _fitted_int4(part), strict=True):
            to.copy_(made)
    dtype = _dtype_of(scales)
    scales, offsets = _stored(scales, dtype), offsets.to(dtype).float()
    for part, scale, offset, to in _slabs(weight, scales, offsets, codes):
        to.copy_(int4_codes(part - offset, scale).flatten(1))
    return QuantizedWeight(
        codes,
        scales.squeeze(-1),
        group_inputs=_SMALL_GROUP,
        bits=4,
        activations=Activations.INT16_GROUP,
        offsets=offsets.squeeze(-1),
    )


def _fitted_int4(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and offsets [num_outputs, num_groups, 1] for ``groups`` [..., 32], float32.

    As make_qkx2_quants of llama.cpp: each candidate divides the range of a group into a number of
    steps.
    """
    low = groups.amin(-1, keepdim=True)
    span = groups.amax(-1, keepdim=True) - low
    importance = groups.square().mean(-1, keepdim=True).sqrt() + groups.abs()
    # Groups of zeros have no importance at all.
    total = importance.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    weighted = importance * groups
    mean = weighted.sum(-1, keepdim=True) / total
    # The rest is about the weighted means, which decorrelates the scale from the offset.
    centred = groups - mean
    best_scales, best_offsets = span / (_MOST_INT4 - _LEAST_INT4), mean
    least = torch.full_like(span, torch.inf)
    for steps in _STEPS:
        codes = ((groups - low) * (steps / span)).round_().add_(_LEAST_INT4)
        codes.clamp_(_LEAST_INT4, _MOST_INT4)
        mean_code = (importance * codes).sum(-1, keepdim=True) / total
        codes -= mean_code
        weighted_codes = importance * codes
        scales = (weighted_codes * centred).sum(-1, keepdim=True)
        scales /= (weighted_codes * codes).sum(-1, keepdim=True)
        errors = (importance * (centred - codes * scales).square()).sum(-1, keepdim=True)
        better = errors < least
        least = torch.where(better, errors, least)
        best_scales = torch.where(better, scales, best_scales)
        best_offsets = torch.where(better, mean - mean_code * scales, best_offsets)
    return best_scales, best_offsets


def _slabs(weight: torch.Tensor, *others: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Yield some outputs of ``weight`` at a time, float32 [..., num_groups, 32], and of ``others``.

    Rounding takes several times the memory of what it rounds, which then stays in the cache.
    """
    num_outputs = max(1, _SLAB // weight.shape[1])
    for begin in range(0, len(weight), num_outputs):
        own = slice(begin, begin + num_outputs)
        part = weight[own].float()
        yield [part.reshape(len(part), -1, _SMALL_GROUP), *(other[own] for other in others)]


def _dtype_of(scales: torch.Tensor) -> torch.dtype:
    """Return the dtype in which to store ``scales``: half precision if it holds almost all."""
    small = ((scales > 0) & (scales < _LEAST_HALF)).float().mean()
    fits = bool(small <= _MOST_SMALL) and bool(scales.amax() <= _MOST_HALF)
    return torch.float16 if fits else torch.float32


def _stored(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``scales`` rounded to ``dtype``, in float32; a scale of 0 becomes 1."""
    least = _LEAST_HALF if dtype is torch.float16 else torch.finfo(dtype).smallest_normal
    return torch.where(scales == 0, 1.0, scales.to(dtype).float().clamp(min=least))


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


# Logits tolerate less rounding than layers, so a head has at least 8 bits.
_BY_NAME = {
    "int8": QuantizeAtLoad(rounded_int8_groups, rounded_int8_groups),
    "int4": QuantizeAtLoad(rounded_int4_groups, rounded_int8_groups),
    "fp8": QuantizeAtLoad(rounded_float8, rounded_float8),
}


def quantize_at_load(quantization: str | None) -> QuantizeAtLoad:
    """Return the rounding for a checked ``ResolvedEngineConfig.quantization``."""
    return QuantizeAtLoad() if quantization is None else _BY_NAME[quantization]
