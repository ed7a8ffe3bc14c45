"""Products of rows and weights [num_outputs, num_inputs].

A program takes some outputs and sums them over all inputs alone, in order, so that a result depends
on tile shapes only. With GATED, the weights have twice as many outputs; the first half gates the
second.
"""

import triton
import triton.language as tl


@triton.jit
def row_product_kernel(
    row,
    weight,
    bias,
    residual,
    out,
    num_outputs,
    num_inputs,
    weight_stride,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    BIASED: tl.constexpr,
    ADDED: tl.constexpr,
    GATED: tl.constexpr,
):
    """Multiply one row. Products are summed by input modulo BLOCK_INPUTS, then over these sums."""
    output = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    inside = output < num_outputs
    inputs = tl.arange(0, BLOCK_INPUTS)
    lines = weight + tl.where(inside, output, 0).to(tl.int64)[:, None] * weight_stride
    behind = tl.cast(num_outputs, tl.int64) * weight_stride  # from a gate to its up
    sums = tl.zeros((BLOCK_OUTPUTS, BLOCK_INPUTS), tl.float32)
    ups = tl.zeros((BLOCK_OUTPUTS, BLOCK_INPUTS), tl.float32)
    for start in tl.range(0, num_inputs, BLOCK_INPUTS, num_stages=NUM_STAGES):
        at = start + inputs
        if EVEN:
            weights = tl.load(lines + at[None, :], eviction_policy="evict_first")
            values = tl.load(row + at)
        else:
            there = at < num_inputs
            weights = tl.load(lines + at[None, :], mask=there[None, :], other=0.0)
            values = tl.load(row + at, mask=there, other=0.0)
        sums += weights.to(tl.float32) * values.to(tl.float32)[None, :]
        if GATED:
            if EVEN:
                weights = tl.load(lines + behind + at[None, :], eviction_policy="evict_first")
            else:
                weights = tl.load(lines + behind + at[None, :], mask=there[None, :], other=0.0)
            ups += weights.to(tl.float32) * values.to(tl.float32)[None, :]
    result = tl.sum(sums, 1)
    if GATED:
        result = result * tl.sigmoid(result) * tl.sum(ups, 1)
    if BIASED:
        result += tl.load(bias + output, mask=inside, other=0.0).to(tl.float32)
    if ADDED:
        result += tl.load(residual + output, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + output, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def product_kernel(
    rows,
    weight,
    bias,
    residual,
    out,
    num_rows,
    num_outputs,
    num_inputs,
    row_stride,
    weight_stride,
    residual_stride,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    BIASED: tl.constexpr,
    ADDED: tl.constexpr,
    GATED: tl.constexpr,
):
    """Multiply tiles of rows and outputs.

    Neighbouring programs take GROUP tiles of rows with the same weights, which then come from the
    cache.
    """
    row_tiles = tl.cdiv(num_rows, BLOCK_ROWS)
    output_tiles = tl.cdiv(num_outputs, BLOCK_OUTPUTS)
    group = tl.program_id(0) // (GROUP * output_tiles)
    group_rows = tl.minimum(row_tiles - group * GROUP, GROUP)
    in_group = tl.program_id(0) % (GROUP * output_tiles)
    row_tile = group * GROUP + in_group % group_rows
    output_tile = in_group // group_rows

    row = row_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    output = output_tile * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    inputs = tl.arange(0, BLOCK_INPUTS)
    has_row = row < num_rows
    has_output = output < num_outputs
    # Rows and outputs outside repeat the first and are not stored. Outside rows are zeros instead
    # if reading repeated rows would cost as much as reading real ones.
    row_lines = rows + tl.where(has_row, row, 0).to(tl.int64)[:, None] * row_stride
    lines = weight + tl.where(has_output, output, 0).to(tl.int64)[None, :] * weight_stride
    behind = tl.cast(num_outputs, tl.int64) * weight_stride  # from a gate to its up
    sums = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), tl.float32)
    ups = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), tl.float32)
    for start in tl.range(0, num_inputs, BLOCK_INPUTS, num_stages=NUM_STAGES):
        at = start + inputs
        if EVEN:
            if BLOCK_ROWS == 16:
                values = tl.load(row_lines + at[None, :], mask=has_row[:, None], other=0.0)
            else:
                values = tl.load(row_lines + at[None, :])
            weights = tl.load(lines + at[:, None])
        else:
            there = at < num_inputs
            wanted = has_row[:, None] & there[None, :]
            values = tl.load(row_lines + at[None, :], mask=wanted, other=0.0)
            weights = tl.load(lines + at[:, None], mask=there[:, None], other=0.0)
        sums = tl.dot(values, weights, sums, input_precision="ieee")
        if GATED:
            if EVEN:
                weights = tl.load(lines + behind + at[:, None])
            else:
                weights = tl.load(lines + behind + at[:, None], mask=there[:, None], other=0.0)
            ups = tl.dot(values, weights, ups, input_precision="ieee")
    if GATED:
        sums = sums * tl.sigmoid(sums) * ups
    if BIASED:
        biases = tl.load(bias + output, mask=has_output, other=0.0)
        sums += biases.to(tl.float32)[None, :]
    inside = has_row[:, None] & has_output[None, :]
    if ADDED:
        added = residual + row.to(tl.int64)[:, None] * residual_stride + output[None, :]
        sums += tl.load(added, mask=inside, other=0.0).to(tl.float32)
    to = out + row.to(tl.int64)[:, None] * num_outputs + output[None, :]
    tl.store(to, sums.to(out.dtype.element_ty), mask=inside)
