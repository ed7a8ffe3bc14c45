"""Rows rounded to 8 bits, with their scales.

The scale of a row with a value that is not finite is NaN, because 8-bit codes could not show it.
"""

import triton
import triton.language as tl


@triton.jit
def _codes(values, scales, MOST: tl.constexpr, INTEGER: tl.constexpr):
    scaled = tl.math.div_rn(values, scales)
    least = -MOST - 1.0 if INTEGER else -MOST
    scaled = tl.minimum(tl.maximum(scaled, least), MOST)
    if INTEGER:
        # In [2^23, 2^24) the sum has no fractional bits: it is rounded, halves to even.
        scaled = scaled + 12582912.0 - 12582912.0
    return scaled.to(tl.int8 if INTEGER else tl.float8e4nv)


@triton.jit(do_not_specialize=["static_scale"])
def round_rows_kernel(
    rows,
    codes,
    scales,
    num_inputs,
    row_stride,
    static_scale,
    MOST: tl.constexpr,
    INTEGER: tl.constexpr,
    STATIC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Round a row with one scale: the largest magnitude over MOST, or if STATIC a constant."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    source = rows + row * row_stride
    most = tl.zeros((BLOCK,), tl.float32)
    doubt = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, num_inputs, BLOCK):
        inside = start + columns < num_inputs
        values = tl.load(source + start + columns, mask=inside, other=0.0).to(tl.float32)
        most = tl.maximum(most, tl.abs(values))
        doubt += values * 0.0
    if STATIC:
        scale = static_scale
    else:
        scale = tl.math.div_rn(tl.max(most, 0), MOST)
        scale = tl.where(scale == 0.0, 1.0, scale)
    tl.store(scales + row, scale + tl.sum(doubt, 0))
    for start in range(0, num_inputs, BLOCK):
        inside = start + columns < num_inputs
        values = tl.load(source + start + columns, mask=inside, other=0.0).to(tl.float32)
        divisors = tl.zeros((BLOCK,), tl.float32) + scale
        rounded = _codes(values, divisors, MOST, INTEGER)
        tl.store(codes + row * num_inputs + start + columns, rounded, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def round_groups_kernel(
    rows,
    codes,
    scales,
    num_rows,
    num_inputs,
    row_stride,
    MOST: tl.constexpr,
    GROUP_INPUTS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
):
    """Round groups of a row, with a scale each, to float8."""
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
    columns = groups[:, None] * GROUP_INPUTS + tl.arange(0, GROUP_INPUTS)[None, :]
    inside = columns < num_inputs
    source = rows + row * row_stride + columns
    values = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    scale = tl.math.div_rn(tl.max(tl.abs(values), 1), MOST)
    scale = tl.where(scale == 0.0, 1.0, scale)
    divisors = tl.zeros((BLOCK_GROUPS, GROUP_INPUTS), tl.float32) + scale[:, None]
    tl.store(codes + row * num_inputs + columns, _codes(values, divisors, MOST, False), mask=inside)
    scale += tl.sum(values * 0.0, 1)
    tl.store(scales + groups * num_rows + row, scale, mask=groups * GROUP_INPUTS < num_inputs)
