"""Grouped products of rows, sorted by expert, with the quantized weights that each row chose.

See ``jit.experts`` for how programs find their rows, and ``jit.quantized`` for the weights.
"""

import triton
import triton.language as tl

from millrace.engine.kernels.gpu.jit.experts import rows_of_program
from millrace.engine.kernels.gpu.jit.quantized import product_sums


@triton.jit(do_not_specialize=["num_source_rows"])
def quantized_experts_kernel(
    rows,
    row_scales,
    stack,
    scales,
    zeros,
    offsets,
    ends,
    order,
    weights,
    out,
    num_source_rows,
    row_stride,
    NUM_INPUTS: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GATHERS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP_INPUTS: tl.constexpr,
    PACKED: tl.constexpr,
    ZEROED: tl.constexpr,
    OFFSETS: tl.constexpr,
    ROUNDED: tl.constexpr,
    ROW_GROUPED: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    expert, places, is_row, pairs, source = rows_of_program(
        ends, order, NUM_EXPERTS, NUM_CHOSEN, GATHERS, BLOCK_EXPERTS, BLOCK_ROWS
    )
    if expert < NUM_EXPERTS:
        outputs = tl.program_id(1) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
        is_output = outputs < NUM_OUTPUTS
        known_output = tl.where(is_output, outputs, 0).to(tl.int64)
        width: tl.constexpr = NUM_INPUTS // 2 if PACKED else NUM_INPUTS
        first_scale = expert.to(tl.int64) * NUM_GROUPS * NUM_OUTPUTS
        sums = product_sums(
            rows + source * row_stride,
            is_row,
            row_scales + source,
            num_source_rows,
            stack + (expert.to(tl.int64) * NUM_OUTPUTS + known_output) * width,
            scales + first_scale + known_output,
            zeros + first_scale + known_output,
            offsets + first_scale + known_output,
            is_output,
            NUM_OUTPUTS,
            NUM_INPUTS,
            BLOCK_ROWS,
            BLOCK_OUTPUTS,
            CHUNK,
            GROUP_INPUTS,
            PACKED,
            ZEROED,
            OFFSETS,
            ROUNDED,
            ROW_GROUPED,
            NUM_STAGES,
        )
        if GATHERS:
            target = places.to(tl.int64)
        else:
            target = pairs
            sums *= tl.load(weights + pairs, mask=is_row, other=0.0)[None, :]
        out_places = out + target[None, :] * NUM_OUTPUTS + outputs[:, None]
        tl.store(
            out_places,
            sums.to(out.dtype.element_ty),
            mask=is_output[:, None] & is_row[None, :],
        )
