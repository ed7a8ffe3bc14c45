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
from millrace.engine.quantization.weight import (
    ROW_GROUP_INPUTS,
    Activations,
    QuantizedWeight,
)

# Widths of inputs and groups must be multiples of this: the lanes in which rows are rounded.
_WIDTH_MULTIPLE = 16
_INT4_ZERO = 8
_NIBBLE_BITS, _NIBBLE = 4, 0xF
_INT8_ZERO = 128
_ROW_CODES = {
    Activations.WIDE: RowCodes.NONE,
    Activations.INT8_TOKEN: RowCodes.INT8,
    Activations.INT8_TENSOR: RowCodes.INT8_STATIC,
    Activations.FLOAT8_TOKEN: RowCodes.FLOAT8,
    Activations.FLOAT8_TENSOR: RowCodes.FLOAT8_STATIC,
    Activations.FLOAT8_GROUP: RowCodes.FLOAT8_GROUPS,
    Activations.INT16_GROUP: RowCodes.INT16_GROUPS,
}
# Formats of groups by the bits of their codes, and the groups that they support.
_GROUP_FORMATS = {4: Format.GROUP4, 5: Format.GROUP5, 6: Format.GROUP6, 8: Format.GROUP8}
_GROUP_SIZES = (16, 32)


def can_be_packed(weight: QuantizedWeight) -> bool:
    """Return whether the compiled products support the weight.

    Its width and group size must be multiples of 16, and all groups of one size. For rows of int16,
    codes must be integers without zeros, the width a multiple of 32, and groups of 16 or 32.
    """
    if weight.num_inputs % weight.group_inputs:
        return False
    if weight.activations is Activations.INT16_GROUP:
        return (
            weight.num_inputs % ROW_GROUP_INPUTS == 0
            and weight.group_inputs in _GROUP_SIZES
            and weight.bits in _GROUP_FORMATS
            and weight.codes.dtype is torch.int8
            and weight.zeros is None
        )
    return (
        weight.num_inputs % _WIDTH_MULTIPLE == 0
        and weight.group_inputs % _WIDTH_MULTIPLE == 0
        and weight.offsets is None
    )


def pack_quantized(weight: QuantizedWeight, bias: torch.Tensor | None) -> PackedWeight:
    """Pack a ``weight`` that ``can_be_packed``, and its ``bias``, bfloat16 [num_outputs]."""
    assert can_be_packed(weight), "the compiled products do not support this weight"
    row_codes = _ROW_CODES[weight.activations]
    if row_codes is RowCodes.INT16_GROUPS:
        return _pack_groups(weight, bias)
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


def _pack_groups(weight: QuantizedWeight, bias: torch.Tensor | None) -> PackedWeight:
    """Pack a weight for rows of int16."""
    code_zero = weight.code_zero
    if weight.bits == 8:
        codes = in_panels(weight.codes, 2)
    else:
        codes = _planes(weight.codes + code_zero, weight.bits)
    given = (weight.scales, weight.offsets)
    numbers = [part for part in given if part is not None]
    # Half precision where it is exact, as for the scales of most formats: less memory is read.
    is_half = all(torch.equal(part.half().float(), part) for part in numbers)
    dtype = torch.float16 if is_half else torch.float32
    scales, offsets = (None if part is None else in_panels(part, 1).to(dtype) for part in given)
    return PackedWeight(
        Panels(codes, scales, offsets, bias, weight.order),
        (weight.num_outputs, weight.num_inputs),
        group_inputs=weight.group_inputs,
        format=_GROUP_FORMATS[weight.bits],
        row_codes=RowCodes.INT16_GROUPS,
        code_zero=code_zero,
    )


def _planes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack ``codes`` [num_outputs, num_inputs] from 0 on: int16 [num_panels, blocks, bits, 32].

    A block of 32 inputs has four vectors of nibbles, then the bits above them, see weights.h.
    """
    num_blocks = codes.shape[1] // ROW_GROUP_INPUTS
    low = _nibbles(codes & _NIBBLE)
    low = low.view(len(low), num_blocks, _NIBBLE_BITS, -1)
    more_bits = bits - _NIBBLE_BITS
    if not more_bits:
        return low
    pairs = in_panels(codes >> _NIBBLE_BITS, 2).to(torch.int32)
    # The bits above the nibbles of 16 pairs fill as many vectors as there are bits.
    per_vector = ROW_GROUP_INPUTS // 2 // more_bits
    pairs = pairs.view(len(pairs), num_blocks, more_bits, per_vector, -1)
    high = sum(pairs[:, :, :, pair] << more_bits * pair for pair in range(per_vector))
    assert isinstance(high, torch.Tensor)
    return torch.cat([low, high.to(torch.int16)], 2).contiguous()


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Pack ``codes`` [num_outputs, num_inputs] from 0 to 15: int16 [panels, inputs / 8, 16, 2].

    Each half word has a nibble of each of four pairs of inputs.
    """
    pairs = in_panels(codes, 2)
    octets = pairs.view(len(pairs), -1, 4, *pairs.shape[2:]).to(torch.int32)
    words = sum(octets[:, :, pair] << _NIBBLE_BITS * pair for pair in range(4))
    assert isinstance(words, torch.Tensor)
    return words.to(torch.int16)


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
    return _nibbles(weight.codes + _INT4_ZERO)


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
