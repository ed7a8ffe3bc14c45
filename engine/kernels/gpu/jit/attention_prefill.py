"""Prefill attention: sequences with any number of query rows each."""

import triton
import triton.language as tl

from millrace.engine.kernels.gpu.jit.attention_tile import attend_tile, block_ids_of


@triton.jit
def query_tile_start(query_starts, sequence, num_single, TILE_ROWS: tl.constexpr):
    """Return the number of a sequence's first query tile.

    There may be an empty tile between the tiles of two sequences.
    """
    row = tl.load(query_starts + sequence)
    return sequence + tl.maximum(row - num_single, 0) // TILE_ROWS


@triton.jit
def attend_tiles(
    begin,
    end,
    query,
    maxima,
    sums,
    totals,
    row_positions,  # int32 [rows]
    length,
    window,
    table,
    cache,
    factor,
    cap_factor,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WINDOWED: tl.constexpr,
    MASKED: tl.constexpr,
    SCALED: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend to tiles ``begin`` … ``end - 1`` of a sequence's keys, in order."""
    tokens = tl.arange(0, BLOCK_TOKENS)
    positions = begin * BLOCK_TOKENS + tokens
    block_ids = block_ids_of(table, positions, positions < length, BLOCK_SIZE)
    for tile in range(begin, end):
        positions = tile * BLOCK_TOKENS + tokens
        ahead = positions + BLOCK_TOKENS
        next_block_ids = block_ids_of(table, ahead, ahead < length, BLOCK_SIZE)
        visible = positions[None, :] <= row_positions[:, None]
        if WINDOWED:
            visible = visible & (positions[None, :] > row_positions[:, None] - window)
        maxima, sums, totals = attend_tile(
            query,
            maxima,
            sums,
            totals,
            cache,
            block_ids,
            positions,
            positions < length,
            visible,
            factor,
            cap_factor,
            HEAD_DIM,
            HEAD_DIM_PADDED,
            BLOCK_SIZE,
            MASKED,
            SCALED,
            CAPPED,
            PRECISION,
        )
        block_ids = next_block_ids
    return maxima, sums, totals


@triton.jit(
    do_not_specialize=["num_sequences", "num_single", "first_tile", "window"],
    do_not_specialize_on_alignment=["query_starts", "lengths", "table_rows", "block_tables"],
)
def prefill_kernel(
    queries,  # [num_tokens, num_heads, HEAD_DIM]
    data,  # keys and values of a layer
    scales,
    query_starts,
    lengths,
    table_rows,
    block_tables,
    out,  # [num_tokens, num_heads, HEAD_DIM]
    num_sequences,
    num_single,
    first_tile,
    window,
    query_stride,
    query_head_stride,
    out_stride,
    out_head_stride,
    block_stride,
    token_stride,
    pair_stride,
    head_stride,
    scale_block_stride,
    scale_token_stride,
    scale_pair_stride,
    scale_head_stride,
    table_stride,
    factor,
    cap_factor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WINDOWED: tl.constexpr,
    SCALED: tl.constexpr,
    CAPPED: tl.constexpr,
    FIXED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute the GROUP query heads of key head h for BLOCK_ROWS // GROUP tokens of one sequence.

    Program (t, h). Later tiles, which see more keys, begin first. With FIXED, all tiles of keys use
    the same instructions, so that a row's result depends on the row, its keys and its values only.
    Otherwise tiles that every row sees completely are computed without masks.
    """
    TILE_ROWS: tl.constexpr = BLOCK_ROWS // GROUP
    tile = first_tile + tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    # Last sequence whose tiles begin at or before this one.
    sequence = 0
    beyond = num_sequences
    while sequence + 1 < beyond:
        middle = (sequence + beyond) // 2
        if query_tile_start(query_starts, middle, num_single, TILE_ROWS) <= tile:
            sequence = middle
        else:
            beyond = middle
    row_start = tl.load(query_starts + sequence)
    num_rows = tl.load(query_starts + sequence + 1) - row_start
    begin_row = (tile - query_tile_start(query_starts, sequence, num_single, TILE_ROWS)) * TILE_ROWS
    if begin_row < num_rows:
        length = tl.load(lengths + sequence)
        table = block_tables + tl.load(table_rows + sequence).to(tl.int64) * table_stride
        cells_of_tile = tl.arange(0, BLOCK_ROWS)
        rows = begin_row + cells_of_tile // GROUP
        columns = tl.arange(0, HEAD_DIM_PADDED)
        real = (cells_of_tile < TILE_ROWS * GROUP) & (rows < num_rows)
        cells = real[:, None] & (columns < HEAD_DIM)[None, :]
        tokens = (row_start + rows).to(tl.int64)
        heads = (head * GROUP + cells_of_tile % GROUP).to(tl.int64)
        query_rows = queries + tokens * query_stride + heads * query_head_stride
        query = tl.load(query_rows[:, None] + columns[None, :], mask=cells, other=0.0)

        context = length - num_rows
        row_positions = context + rows
        first_position = context + begin_row
        last_position = context + tl.minimum(begin_row + TILE_ROWS, num_rows) - 1
        end = tl.where(length > 0, last_position // BLOCK_TOKENS + 1, 0)
        if WINDOWED:
            begin = tl.minimum(tl.maximum(first_position - window + 1, 0) // BLOCK_TOKENS, end)
        else:
            begin = 0
        data += head.to(tl.int64) * head_stride
        if SCALED:
            scales += head.to(tl.int64) * scale_head_stride
        cache = (
            data,
            block_stride,
            token_stride,
            pair_stride,
            scales,
            scale_block_stride,
            scale_token_stride,
            scale_pair_stride,
        )

        maxima = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
        sums = tl.zeros([BLOCK_ROWS], tl.float32)
        totals = tl.zeros([BLOCK_ROWS, HEAD_DIM_PADDED], tl.float32)
        # Every row sees all of the tiles ``full_begin`` … ``full_end - 1``, which need no masks.
        full_begin = begin
        full_end = begin
        if not FIXED:
            if WINDOWED:
                hidden = tl.maximum(last_position - window + 1, 0)
                full_begin = tl.minimum(tl.cdiv(hidden, BLOCK_TOKENS), end)
            full_end = tl.minimum(tl.maximum((first_position + 1) // BLOCK_TOKENS, full_begin), end)
        edges = (begin, full_begin, full_end, end)
        # Earlier tiles need masks only if there is a window.
        FIRST_SPAN: tl.constexpr = 2 if FIXED else (0 if WINDOWED else 1)
        for span in tl.static_range(FIRST_SPAN, 3):
            maxima, sums, totals = attend_tiles(
                edges[span],
                edges[span + 1],
                query,
                maxima,
                sums,
                totals,
                row_positions,
                length,
                window,
                table,
                cache,
                factor,
                cap_factor,
                HEAD_DIM,
                HEAD_DIM_PADDED,
                BLOCK_SIZE,
                BLOCK_TOKENS,
                WINDOWED,
                span != 1,
                SCALED,
                CAPPED,
                PRECISION,
            )
        divisors = tl.where(sums == 0.0, 1.0, sums)
        out_rows = out + tokens * out_stride + heads * out_head_stride
        result = totals / divisors[:, None]
        tl.store(out_rows[:, None] + columns[None, :], result.to(out.dtype.element_ty), mask=cells)
