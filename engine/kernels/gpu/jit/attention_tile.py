"""Online-softmax attention of a tile of query rows and a tile of keys and values."""

import triton
import triton.language as tl


@triton.jit
def block_ids_of(table, positions, wanted, BLOCK_SIZE: tl.constexpr):
    """Return the block of each position, or 0 if not wanted.

    The ids stay int32, as loaded: if a loop carries a load's own result to its next turn, the
    compiler starts the load one turn earlier. It does not for a value computed from the load.
    """
    return tl.load(table + positions // BLOCK_SIZE, mask=wanted, other=0)


@triton.jit
def attend_tile(
    queries,  # [rows, HEAD_DIM_PADDED]
    maxima,  # [rows], of the scores so far, times log2(e)
    sums,  # [rows], of exp2(score - maximum)
    totals,  # [rows, HEAD_DIM_PADDED], of values so weighted
    cache,  # of this head, see below
    block_ids,  # int32 [BLOCK_TOKENS]
    positions,  # int32 [BLOCK_TOKENS]
    stored,  # [BLOCK_TOKENS]: which positions may be read, if MASKED
    visible,  # [rows or 1, BLOCK_TOKENS]: which scores count, if MASKED
    factor,
    cap_factor,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
    SCALED: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute one turn of the online softmax: new maxima, sums and totals.

    ``cache`` holds the head's keys, their strides by block, by token and from keys to values, and
    with SCALED the same of its scales. A tile of which a row sees nothing leaves the row's three
    values unchanged, bit by bit.
    """
    data, block_stride, token_stride, pair_stride = cache[0], cache[1], cache[2], cache[3]
    block_ids = block_ids.to(tl.int64)
    offsets = positions % BLOCK_SIZE
    columns = tl.arange(0, HEAD_DIM_PADDED)
    rows = data + block_ids * block_stride + offsets.to(tl.int64) * token_stride
    pointers = rows[:, None] + columns[None, :]
    if MASKED and HEAD_DIM != HEAD_DIM_PADDED:
        loaded = stored[:, None] & (columns < HEAD_DIM)[None, :]
        keys = tl.load(pointers, mask=loaded, other=0.0)
        values = tl.load(pointers + pair_stride, mask=loaded, other=0.0)
    elif MASKED:
        keys = tl.load(pointers, mask=stored[:, None], other=0.0)
        values = tl.load(pointers + pair_stride, mask=stored[:, None], other=0.0)
    elif HEAD_DIM != HEAD_DIM_PADDED:
        loaded = (columns < HEAD_DIM)[None, :]
        keys = tl.load(pointers, mask=loaded, other=0.0)
        values = tl.load(pointers + pair_stride, mask=loaded, other=0.0)
    else:
        keys = tl.load(pointers)
        values = tl.load(pointers + pair_stride)

    if SCALED:
        # The conversion by float16 and float32 takes a third of the direct conversion's time.
        keys = keys.to(tl.float16).to(tl.float32)
    scores = tl.dot(queries, tl.trans(keys.to(queries.dtype)), input_precision=PRECISION)
    if SCALED:
        scale_rows = cache[4] + block_ids * cache[5] + offsets.to(tl.int64) * cache[6]
        # Loaded together: with fewer elements than threads, a program would load copies.
        scale_pointers = scale_rows[:, None] + tl.arange(0, 2)[None, :] * cache[7]
        if MASKED:
            pairs = tl.load(scale_pointers, mask=stored[:, None], other=0.0)
        else:
            pairs = tl.load(scale_pointers)
        key_scales, value_scales = tl.split(pairs)
        scores *= key_scales[None, :]
    if CAPPED:
        # tanh; exact at both ends, where exp2 is 0 or infinite.
        scores = 1.0 - 2.0 / (tl.exp2(scores * cap_factor) + 1.0)
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    new_maxima = tl.maximum(maxima, tl.max(scores, 1) * factor)
    shifts = new_maxima
    if MASKED:
        shifts = tl.where(new_maxima == float("-inf"), 0.0, new_maxima)
    weights = tl.exp2(scores * factor - shifts[:, None])
    fades = tl.exp2(maxima - shifts)
    sums = sums * fades + tl.sum(weights, 1)
    if SCALED:
        weights *= value_scales[None, :]
        values = values.to(tl.float16).to(tl.float32)
    totals = tl.dot(
        weights.to(queries.dtype),
        values.to(queries.dtype),
        totals * fades[:, None],
        input_precision=PRECISION,
    )
    return new_maxima, sums, totals
