"""Split-KV decode attention: the partition of the tiles, the partial results, their reduction."""

import triton
import triton.language as tl

from millrace.engine.kernels.gpu.jit.attention_tile import attend_tile, block_ids_of


@triton.jit
def first_tile_of(length, window, BLOCK_TOKENS: tl.constexpr):
    """Return the first tile of a sequence that its last token sees."""
    return tl.maximum(length - window, 0) // BLOCK_TOKENS


@triton.jit
def tile_counts(lengths, inside, window, BLOCK_TOKENS: tl.constexpr):
    """Return each sequence's number of tiles, at least 1: a program must write zeros."""
    length = tl.load(lengths, mask=inside, other=0)
    first = first_tile_of(length, window, BLOCK_TOKENS)
    counts = tl.maximum((length + BLOCK_TOKENS - 1) // BLOCK_TOKENS - first, 1)
    return tl.where(inside, counts, 0)


@triton.jit
def share_start(share, num_tiles, num_shares):
    """Return the first tile of a share; the shares' sizes differ by at most one."""
    return ((share.to(tl.int64) * num_tiles) // num_shares).to(tl.int32)


@triton.jit(
    do_not_specialize=["num_sequences", "num_shares", "starts_stride"],
    do_not_specialize_on_alignment=["lengths", "windows", "tile_starts", "first_sequences"],
)
def cut_kernel(
    lengths,  # int32 [num_sequences]
    windows,  # int32 [num_windows]
    tile_starts,  # out: int32 [num_windows, starts_stride], num_sequences + 1 of each row
    first_sequences,  # out: int32 [num_windows, num_shares]
    num_sequences,
    num_shares,
    starts_stride,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_SEQUENCES: tl.constexpr,
    BLOCK_SHARES: tl.constexpr,
):
    """Find the sequences in which some shares begin; program (i, w) is for one window w.

    The first program of a window also computes the prefix sums of the sequences' tiles.
    """
    chunk = tl.program_id(0)
    window_index = tl.program_id(1)
    window = tl.load(windows + window_index)
    tile_starts += window_index * starts_stride
    first_sequences += window_index * num_shares
    rows = tl.arange(0, BLOCK_SEQUENCES)

    num_tiles = 0
    for begin in range(0, num_sequences, BLOCK_SEQUENCES):
        inside = begin + rows < num_sequences
        num_tiles += tl.sum(tile_counts(lengths + begin + rows, inside, window, BLOCK_TOKENS))

    shares = chunk * BLOCK_SHARES + tl.arange(0, BLOCK_SHARES)
    starts = share_start(shares, num_tiles, num_shares)
    sequences = tl.zeros([BLOCK_SHARES], tl.int32)
    before = 0
    for begin in range(0, num_sequences, BLOCK_SEQUENCES):
        inside = begin + rows < num_sequences
        counts = tile_counts(lengths + begin + rows, inside, window, BLOCK_TOKENS)
        ends = before + tl.cumsum(counts, 0)
        passed = inside[:, None] & (ends[:, None] <= starts[None, :])
        sequences += tl.sum(passed.to(tl.int32), 0)
        tl.store(tile_starts + 1 + begin + rows, ends, mask=inside & (chunk == 0))
        before += tl.sum(counts)
    tl.store(tile_starts, 0, mask=chunk == 0)
    tl.store(first_sequences + shares, sequences, mask=shares < num_shares)


@triton.jit(
    do_not_specialize=["num_sequences", "window", "num_shares"],
    do_not_specialize_on_alignment=[
        "lengths",
        "table_rows",
        "block_tables",
        "tile_starts",
        "first_sequences",
    ],
)
def decode_kernel(
    queries,  # [num_sequences or more, num_heads, HEAD_DIM]
    data,  # keys and values of a layer
    scales,
    lengths,
    table_rows,
    block_tables,
    tile_starts,  # int32 [num_sequences + 1]
    first_sequences,  # int32 [num_shares]
    out,  # [num_sequences or more, num_heads, HEAD_DIM]
    partial_totals,  # float32 [num_shares, num_kv_heads, 2, GROUP, HEAD_DIM]
    partial_stats,  # float32 [num_shares, num_kv_heads, 2, GROUP, 2]: maximum and sum
    num_sequences,
    window,
    num_shares,
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
    GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WINDOWED: tl.constexpr,
    SCALED: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute share s of the tiles of key head h, sequence by sequence; program (h, s).

    A sequence that lies in this share completely is written to ``out``. The rest of a sequence that
    began in an earlier share is written to the first slot of this share's partial results, and a
    sequence that continues in the next share to the second slot.
    """
    head = tl.program_id(0)
    share = tl.program_id(1)
    num_tiles = tl.load(tile_starts + num_sequences)
    start = share_start(share, num_tiles, num_shares)
    end = share_start(share + 1, num_tiles, num_shares)
    sequence = tl.load(first_sequences + share)

    group = tl.arange(0, GROUP_PADDED)
    columns = tl.arange(0, HEAD_DIM_PADDED)
    cells = (group < GROUP)[:, None] & (columns < HEAD_DIM)[None, :]
    heads = (head * GROUP + group)[:, None].to(tl.int64)
    tokens = tl.arange(0, BLOCK_TOKENS)
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
    cursor = start
    while cursor < end:
        sequence_start = tl.load(tile_starts + sequence)
        sequence_end = tl.load(tile_starts + sequence + 1)
        length = tl.load(lengths + sequence)
        table = block_tables + tl.load(table_rows + sequence).to(tl.int64) * table_stride
        query_row = queries + sequence.to(tl.int64) * query_stride
        query = tl.load(
            query_row + heads * query_head_stride + columns[None, :], mask=cells, other=0.0
        )
        stop = tl.minimum(sequence_end, end)
        first_tile = first_tile_of(length, window, BLOCK_TOKENS) - sequence_start
        maxima = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
        sums = tl.zeros([GROUP_PADDED], tl.float32)
        totals = tl.zeros([GROUP_PADDED, HEAD_DIM_PADDED], tl.float32)
        positions = (first_tile + cursor) * BLOCK_TOKENS + tokens
        # Looked up one tile ahead, so that no load of keys waits for it.
        block_ids = block_ids_of(table, positions, positions < length, BLOCK_SIZE)
        for tile in range(first_tile + cursor, first_tile + stop):
            positions = tile * BLOCK_TOKENS + tokens
            ahead = positions + BLOCK_TOKENS
            next_block_ids = block_ids_of(table, ahead, ahead < length, BLOCK_SIZE)
            stored = positions < length
            if WINDOWED:
                stored = stored & (positions >= length - window)
            maxima, sums, totals = attend_tile(
                query,
                maxima,
                sums,
                totals,
                cache,
                block_ids,
                positions,
                stored,
                stored[None, :],
                factor,
                cap_factor,
                HEAD_DIM,
                HEAD_DIM_PADDED,
                BLOCK_SIZE,
                True,
                SCALED,
                CAPPED,
                PRECISION,
            )
            block_ids = next_block_ids

        if (cursor == sequence_start) & (stop == sequence_end):
            divisors = tl.where(sums == 0.0, 1.0, sums)
            rows = out + sequence.to(tl.int64) * out_stride + heads * out_head_stride
            result = totals / divisors[:, None]
            tl.store(rows + columns[None, :], result.to(out.dtype.element_ty), mask=cells)
        else:
            slot = (share.to(tl.int64) * tl.num_programs(0) + head) * 2 + (cursor != start)
            places = slot * GROUP + group
            tl.store(
                partial_totals + places[:, None] * HEAD_DIM + columns[None, :], totals, mask=cells
            )
            tl.store(partial_stats + places * 2, maxima, mask=group < GROUP)
            tl.store(partial_stats + places * 2 + 1, sums, mask=group < GROUP)
        cursor = stop
        sequence += 1


@triton.jit(
    do_not_specialize=["num_sequences", "num_shares"],
    do_not_specialize_on_alignment=["tile_starts", "first_sequences"],
)
def combine_kernel(
    partial_totals,  # float32 [num_shares, num_kv_heads, 2, GROUP, HEAD_DIM]
    partial_stats,  # float32 [num_shares, num_kv_heads, 2, GROUP, 2]
    tile_starts,  # int32 [num_sequences + 1]
    first_sequences,  # int32 [num_shares]
    out,  # [num_sequences or more, num_heads, HEAD_DIM]
    num_sequences,
    num_shares,
    out_stride,
    out_head_stride,
    num_kv_heads,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SHARES: tl.constexpr,
):
    """Combine a sequence's shares in order; program (h, s - 1) for query head h.

    Runs only if the start of share s is the first cut through a sequence.
    """
    head = tl.program_id(0)
    share = tl.program_id(1) + 1
    num_tiles = tl.load(tile_starts + num_sequences)
    start = share_start(share, num_tiles, num_shares)
    first_start = share_start(share - 1, num_tiles, num_shares)
    sequence = tl.load(first_sequences + share)
    sequence_start = tl.load(tile_starts + sequence)
    if (start > sequence_start) & (first_start <= sequence_start):
        sequence_end = tl.load(tile_starts + sequence + 1)
        # Last share that begins before the sequence's end.
        last = ((sequence_end.to(tl.int64) * num_shares - 1) // num_tiles).to(tl.int32)
        columns = tl.arange(0, HEAD_DIM_PADDED)
        maximum = float("-inf")
        sum_ = 0.0
        totals = tl.zeros([HEAD_DIM_PADDED], tl.float32)
        for begin in range(share - 1, last + 1, BLOCK_SHARES):
            shares = begin + tl.arange(0, BLOCK_SHARES)
            starts = share_start(shares, num_tiles, num_shares)
            # Shares without a tile have written nothing.
            given = (shares <= last) & (share_start(shares + 1, num_tiles, num_shares) > starts)
            slots = (shares.to(tl.int64) * num_kv_heads + head // GROUP) * 2
            places = (slots + (starts < sequence_start)) * GROUP + head % GROUP
            maxima = tl.load(partial_stats + places * 2, mask=given, other=float("-inf"))
            sums = tl.load(partial_stats + places * 2 + 1, mask=given, other=0.0)
            cells = given[:, None] & (columns < HEAD_DIM)[None, :]
            pointers = partial_totals + places[:, None] * HEAD_DIM + columns[None, :]
            parts = tl.load(pointers, mask=cells, other=0.0)
            new_maximum = tl.maximum(maximum, tl.max(maxima, 0))
            shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
            fade = tl.exp2(maximum - shift)
            fades = tl.exp2(maxima - shift)
            sum_ = sum_ * fade + tl.sum(sums * fades, 0)
            totals = totals * fade + tl.sum(parts * fades[:, None], 0)
            maximum = new_maximum
        divisor = tl.where(sum_ == 0.0, 1.0, sum_)
        row = out + sequence.to(tl.int64) * out_stride + head.to(tl.int64) * out_head_stride
        result = (totals / divisor).to(out.dtype.element_ty)
        tl.store(row + columns, result, mask=columns < HEAD_DIM)
