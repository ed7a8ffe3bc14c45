"""Quantized weights in the layout of the compiled products."""

from __future__ import annotations

import torch

from millrace.engine.kernels.packed_weight import (
    Format,
    PackedWeight,
    Panels,
    RowCodes,
    in_panels,
)
from millrace.engine.quantization.weight import Activations, QuantizedWeight

# Widths of inputs and groups must be multiples of this: the lanes in which rows are rounded.
_WIDTH_MULTIPLE = 16
_INT4_ZERO = 8
_NIBBLE_BITS = 4
_INT8_ZERO = 128
_ROW_CODES = {
    Activations.WIDE: RowCodes.NONE,
    Activations.INT8_TOKEN: RowCodes.INT8,
    Activations.INT8_TENSOR: RowCodes.INT8_STATIC,
    Activations.FLOAT8_TOKEN: RowCodes.FLOAT8,
    Activations.FLOAT8_TENSOR: RowCodes.FLOAT8_STATIC,
    Activations.FLOAT8_GROUP: RowCodes.FLOAT8_GROUPS,
}


def can_be_packed(weight: QuantizedWeight) -> bool:
    """Return whether the compiled products support the weight.

    Its width and group size must be multiples of 16, and all groups of one size.
    """
    return not (
        weight.num_inputs % _WIDTH_MULTIPLE
        or weight.group_inputs % _WIDTH_MULTIPLE
        or weight.num_inputs % weight.group_inputs
    )


def pack_quantized(weight: QuantizedWeight, bias: torch.Tensor | None) -> PackedWeight:
    """Pack a ``weight`` that ``can_be_packed``, and its ``bias``, bfloat16 [num_outputs]."""
    assert can_be_packed(weight), "the compiled products do not support this weight"
    row_codes = _ROW_CODES[weight.activations]
    form = _format(weight, row_codes)
    scales = in_panels(weight.scales, 1).float()
    panels = Panels(_codes(weight, form), scales, _offsets(weight, form), bias, weight.order)
    return PackedWeight(
        panels,
        (weight.num_outputs, weight.num_inputs),
        group_inputs=weight.group_inputs,
        format=form,
        row_codes=row_codes,
        row_scale=weight.activation_scale or 1.0,
    )


def _format(weight: QuantizedWeight, row_codes: RowCodes) -> Format:
    if weight.codes.dtype is torch.float8_e4m3fn:
        return Format.FLOAT8
    if weight.bits == _NIBBLE_BITS:
        return Format.INT4
    is_one_group = weight.scales.shape[1] == 1 and weight.zeros is None
    if is_one_group and row_codes in (RowCodes.INT8, RowCodes.INT8_STATIC):
        return Format.INT8_DOT
    return Format.INT8


def _codes(weight: QuantizedWeight, form: Format) -> torch.Tensor:
    if form is Format.FLOAT8:
        return in_panels(weight.codes.view(torch.uint8), 2)
    if form is Format.INT8:
        return in_panels(weight.codes, 2)
    if form is Format.INT8_DOT:
        return in_panels(weight.codes, 4)
    # Each half word has a nibble of each of four pairs of inputs.
    pairs = in_panels(weight.codes, 2)
    octets = pairs.view(len(pairs), -1, 4, *pairs.shape[2:]).to(torch.int32) + _INT4_ZERO
    words = sum(octets[:, :, pair] << _NIBBLE_BITS * pair for pair in range(4))
    assert isinstance(words, torch.Tensor)
    return words.to(torch.int16)


def _offsets(weight: QuantizedWeight, form: Format) -> torch.Tensor | None:
    """Return the offsets to subtract from a sum, or None.

    For rows in bytes, which are offset by 128, they are sums of codes; otherwise zero points.
    """
    if form is Format.INT8_DOT:
        sums = weight.codes.sum(1, keepdim=True, dtype=torch.int32)
        return in_panels(sums * _INT8_ZERO, 1)
    if weight.zeros is None:
        return None
    return in_panels(weight.scales * weight.zeros, 1).float()
