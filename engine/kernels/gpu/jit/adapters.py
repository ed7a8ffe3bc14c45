"""Addition of adapters' products: rows times A, then times B, each row by its own adapter.

A program takes a tile of rows with one adapter, looks up its matrices, and loops over its ranks.
The grid has room for the worst case; programs without a tile, and programs of slices without a
matrix, end at once.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def shrink_kernel(
    rows,
    data,
    table,
    tiles,
    order,
    partials,
    num_rows,
    row_stride,
    data_stride,
    table_stride,
    NUM_INPUTS: tl.constexpr,
    SPLIT_INPUTS: tl.constexpr,
    MAX_RANKS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    EVEN: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Multiply rows with A of all slices, over SPLIT_INPUTS of the inputs.

    Returns float32 [splits, num_rows, MAX_RANKS] in the order of the tiles' rows. EVEN means that
    BLOCK_INPUTS divides inputs and splits.
    """
    tile = tiles + tl.program_id(0) * 4
    slot = tl.load(tile)
    if slot >= 0:
        numbers = table + slot.to(tl.int64) * table_stride
        ranks = tl.load(numbers + 1).to(tl.int32)
        first = tl.load(tile + 1)
        own = tl.arange(0, BLOCK_ROWS)
        has_row = own < tl.load(tile + 2)
        # Rows after the last repeat the first, so that they need no mask.
        row = tl.load(order + first + tl.where(has_row, own, 0)).to(tl.int64)
        row_lines = rows + row[:, None] * row_stride
        matrix = data + slot.to(tl.int64) * data_stride
        matrix += tl.multiple_of(tl.load(numbers), 16)
        split = tl.program_id(1)
        begin = split * SPLIT_INPUTS
        end = tl.minimum(begin + SPLIT_INPUTS, NUM_INPUTS)
        place = split.to(tl.int64) * num_rows + first + own
        inputs = tl.arange(0, BLOCK_INPUTS)
        for first_rank in range(0, ranks, BLOCK_RANKS):
            rank = first_rank + tl.arange(0, BLOCK_RANKS)
            has_rank = rank < ranks
            lines = matrix + rank.to(tl.int64)[None, :] * NUM_INPUTS
            sums = tl.zeros((BLOCK_ROWS, BLOCK_RANKS), tl.float32)
            for start in tl.range(begin, end, BLOCK_INPUTS, num_stages=NUM_STAGES):
                at = start + inputs
                if EVEN:
                    if BLOCK_ROWS == 16:
                        values = tl.load(row_lines + at[None, :], mask=has_row[:, None], other=0.0)
                    else:
                        values = tl.load(row_lines + at[None, :])
                    weights = tl.load(lines + at[:, None], mask=has_rank[None, :], other=0.0)
                else:
                    there = at < end
                    wanted = has_row[:, None] & there[None, :]
                    values = tl.load(row_lines + at[None, :], mask=wanted, other=0.0)
                    wanted = there[:, None] & has_rank[None, :]
                    weights = tl.load(lines + at[:, None], mask=wanted, other=0.0)
                sums = tl.dot(values, weights, sums, input_precision="ieee")
            to = partials + place[:, None] * MAX_RANKS + rank[None, :]
            tl.store(to, sums, mask=has_row[:, None] & has_rank[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def expand_kernel(
    partials,
    data,
    table,
    tiles,
    order,
    out,
    num_rows,
    out_stride,
    data_stride,
    table_stride,
    NUM_SPLITS: tl.constexpr,
    MAX_RANKS: tl.constexpr,
    FIRST_WIDTH: tl.constexpr,
    OTHER_WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
):
    """Add the products of ``shrink_kernel``'s sums with B to ``out``.

    A program takes outputs of one slice. The first slice has FIRST_WIDTH outputs, others
    OTHER_WIDTH.
    """
    FIRST_BLOCKS: tl.constexpr = (FIRST_WIDTH + BLOCK_OUTPUTS - 1) // BLOCK_OUTPUTS
    OTHER_BLOCKS: tl.constexpr = max(1, (OTHER_WIDTH + BLOCK_OUTPUTS - 1) // BLOCK_OUTPUTS)
    tile = tiles + tl.program_id(0) * 4
    slot = tl.load(tile)
    if slot >= 0:
        behind = tl.program_id(1) - FIRST_BLOCKS
        other = tl.maximum(behind, 0) // OTHER_BLOCKS
        is_first = behind < 0
        part = tl.where(is_first, 0, 1 + other)
        width = tl.where(is_first, FIRST_WIDTH, OTHER_WIDTH)
        block = tl.where(is_first, tl.program_id(1), behind - other * OTHER_BLOCKS)
        begin = tl.where(is_first, 0, FIRST_WIDTH + other * OTHER_WIDTH)
        numbers = table + slot.to(tl.int64) * table_stride + 2 + part * 3
        ranks = tl.multiple_of(tl.load(numbers + 1).to(tl.int32), 16)
        if ranks > 0:
            first = tl.load(tile + 1)
            own = tl.arange(0, BLOCK_ROWS)
            has_row = own < tl.load(tile + 2)
            row = tl.load(order + first + tl.where(has_row, own, 0)).to(tl.int64)
            output = block * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
            has_output = output < width
            matrix = data + slot.to(tl.int64) * data_stride
            matrix += tl.multiple_of(tl.load(numbers), 16)
            lines = matrix + output.to(tl.int64)[None, :] * ranks
            places = (first + own).to(tl.int64)[:, None] * MAX_RANKS
            places += tl.multiple_of(tl.load(numbers + 2), 16)
            step = tl.cast(num_rows, tl.int64) * MAX_RANKS
            sums = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), tl.float32)
            for first_rank in range(0, ranks, BLOCK_RANKS):
                rank = first_rank + tl.arange(0, BLOCK_RANKS)
                has_rank = rank < ranks
                inside = has_row[:, None] & has_rank[None, :]
                shrunk = tl.zeros((BLOCK_ROWS, BLOCK_RANKS), tl.float32)
                for split in tl.static_range(NUM_SPLITS):
                    at = partials + split * step + places + rank[None, :]
                    shrunk += tl.load(at, mask=inside, other=0.0)
                inside = has_rank[:, None] & has_output[None, :]
                weights = tl.load(lines + rank[:, None], mask=inside, other=0.0)
                sums = tl.dot(shrunk.to(weights.dtype), weights, sums, input_precision="ieee")
            to = out + row[:, None] * out_stride + begin + output[None, :]
            inside = has_row[:, None] & has_output[None, :]
            sums += tl.load(to, mask=inside, other=0.0).to(tl.float32)
            tl.store(to, sums.to(out.dtype.element_ty), mask=inside)
