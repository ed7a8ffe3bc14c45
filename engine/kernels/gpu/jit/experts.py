"""Mixture of experts: top-k routing, grouped matrix products, and the sum of a row's choices.


The products multiply rows, sorted by expert, with the weights that each row chose. The number of
rows of each expert is known on the device only, so the grid has room for the worst case: every
program looks up its expert, and programs after the last row end at once.
"""

import triton
import triton.language as tl


@triton.jit
def route_kernel(
    scores,
    weights,
    chosen,
    score_stride,
    NUM_EXPERTS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    NORMALIZED: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_CHOSEN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK_EXPERTS)
    choices = tl.arange(0, BLOCK_CHOSEN)
    inside = experts < NUM_EXPERTS
    own = tl.load(scores + row * score_stride + experts, mask=inside, other=float("-inf"))
    own = own.to(tl.float32)
    # NaN scores still choose some expert; the row's NaN weights reveal them.
    ranked = tl.where(own == own, own, float("-inf"))
    ranked = tl.where(inside, tl.maximum(ranked, -3.0e38), float("-inf"))
    powers = tl.exp(own - tl.max(own, 0))
    total = tl.sum(powers, 0)
    best_weights = tl.zeros((BLOCK_CHOSEN,), tl.float32)
    best_experts = tl.zeros((BLOCK_CHOSEN,), tl.int32)
    for choice in tl.static_range(NUM_CHOSEN):
        best = tl.argmax(ranked, 0)
        weight = tl.sum(tl.where(experts == best, powers, 0.0), 0) / total
        best_weights = tl.where(choices == choice, weight, best_weights)
        best_experts = tl.where(choices == choice, best, best_experts)
        ranked = tl.where(experts == best, float("-inf"), ranked)
    if NORMALIZED:
        best_weights = best_weights / tl.sum(best_weights, 0)
    out = row * NUM_CHOSEN + choices
    tl.store(weights + out, best_weights, mask=choices < NUM_CHOSEN)
    tl.store(chosen + out, best_experts.to(tl.int16), mask=choices < NUM_CHOSEN)


@triton.jit
def rows_of_program(
    ends,
    order,
    NUM_EXPERTS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    GATHERS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Return (expert, places, is_row, pairs, source) of a program.

    ``expert`` is its expert, or NUM_EXPERTS for none. ``places`` are its rows' places in sorted
    order, and ``is_row`` tells which exist. ``pairs`` are their choices, and ``source`` the rows to
    multiply. Places after the last repeat an existing row, so that loads need no mask.
    """
    tile = tl.program_id(0)
    experts = tl.arange(0, BLOCK_EXPERTS)
    inside = experts < NUM_EXPERTS
    expert_ends = tl.load(ends + experts, mask=inside, other=0)
    expert_starts = tl.load(ends + experts - 1, mask=inside & (experts > 0), other=0)
    num_tiles = tl.where(inside, tl.cdiv(expert_ends - expert_starts, BLOCK_ROWS), 0)
    last_tiles = tl.cumsum(num_tiles, 0)
    expert = tl.sum((inside & (last_tiles <= tile)).to(tl.int32), 0)
    is_own = experts == expert
    first_tile = tl.sum(tl.where(is_own, last_tiles - num_tiles, 0), 0)
    start = tl.sum(tl.where(is_own, expert_starts, 0), 0) + (tile - first_tile) * BLOCK_ROWS
    places = start + tl.arange(0, BLOCK_ROWS)
    is_row = places < tl.sum(tl.where(is_own, expert_ends, 0), 0)
    pairs = tl.load(order + places, mask=is_row, other=0)
    source = pairs // NUM_CHOSEN if GATHERS else tl.where(is_row, places, start).to(tl.int64)
    return expert, places, is_row, pairs, source


@triton.jit
def expert_products_kernel(
    rows,
    stack,
    ends,
    order,
    weights,
    out,
    row_stride,
    NUM_INPUTS: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    GATHERS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
):
    expert, places, is_row, pairs, source = rows_of_program(
        ends, order, NUM_EXPERTS, NUM_CHOSEN, GATHERS, BLOCK_EXPERTS, BLOCK_ROWS
    )
    if expert < NUM_EXPERTS:
        outputs = tl.program_id(1) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
        is_output = outputs < NUM_OUTPUTS
        known_outputs = tl.where(is_output, outputs, 0)
        inputs = tl.arange(0, BLOCK_INPUTS)
        stack += expert.to(tl.int64) * NUM_OUTPUTS * NUM_INPUTS
        row_places = rows + source[:, None] * row_stride + inputs[None, :]
        stack_places = stack + known_outputs[None, :] * NUM_INPUTS + inputs[:, None]
        sums = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), tl.float32)
        for begin in range(0, NUM_INPUTS, BLOCK_INPUTS):
            if NUM_INPUTS % BLOCK_INPUTS == 0:
                left = tl.load(row_places)
                right = tl.load(stack_places)
            else:
                is_input = inputs < NUM_INPUTS - begin
                left = tl.load(row_places, mask=is_input[None, :], other=0.0)
                right = tl.load(stack_places, mask=is_input[:, None], other=0.0)
            sums = tl.dot(left, right, sums, input_precision="ieee")
            row_places += BLOCK_INPUTS
            stack_places += BLOCK_INPUTS
        if GATHERS:
            target = places.to(tl.int64)
        else:
            target = pairs
            sums *= tl.load(weights + pairs, mask=is_row, other=0.0)[:, None]
        out_places = out + target[:, None] * NUM_OUTPUTS + outputs[None, :]
        tl.store(
            out_places,
            sums.to(out.dtype.element_ty),
            mask=is_row[:, None] & is_output[None, :],
        )


@triton.jit
def add_choices_kernel(
    total,
    results,
    total_stride,
    WIDTH: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    place = total + row * total_stride + columns
    sums = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    results += row * NUM_CHOSEN * WIDTH
    for choice in tl.static_range(NUM_CHOSEN):
        own = tl.load(results + choice * WIDTH + columns, mask=inside, other=0.0)
        sums += own.to(tl.float32)
    tl.store(place, sums.to(total.dtype.element_ty), mask=inside)
