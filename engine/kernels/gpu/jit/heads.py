"""RMSNorm and RoPE of query and key heads, and the store of keys and values in the cache.

One program takes a few heads of one token, each as two halves, whose elements RoPE pairs.
"""

import triton
import triton.language as tl


@triton.jit
def rotate_store_kernel(
    heads,
    cosines,
    sines,
    query_norm,
    key_norm,
    cache,
    scales,
    slots,
    epsilon,
    token_stride,
    rotation_stride,
    block_stride,
    offset_stride,
    pair_stride,
    head_stride,
    scale_block_stride,
    scale_offset_stride,
    scale_pair_stride,
    scale_head_stride,
    NUM_QUERIES: tl.constexpr,
    NUM_KEYS: tl.constexpr,
    HALF_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NORMED: tl.constexpr,
    SCALED: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    MAX_SCALED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    element = tl.arange(0, HALF)
    in_half = element < HALF_DIM
    inside = (head < NUM_QUERIES + 2 * NUM_KEYS)[:, None] & in_half[None, :]
    is_query = (head < NUM_QUERIES)[:, None]
    is_rotated = (head < NUM_QUERIES + NUM_KEYS)[:, None]

    place = heads + token * token_stride + head[:, None] * (2 * HALF_DIM) + element[None, :]
    first = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(place + HALF_DIM, mask=inside, other=0.0).to(tl.float32)

    if NORMED:
        squares = tl.sum(first * first + second * second, 1)
        scale = tl.rsqrt(squares / (2 * HALF_DIM) + epsilon)[:, None]
        query_first = tl.load(query_norm + element, mask=in_half, other=0.0).to(tl.float32)
        query_second = tl.load(query_norm + HALF_DIM + element, mask=in_half, other=0.0)
        key_first = tl.load(key_norm + element, mask=in_half, other=0.0).to(tl.float32)
        key_second = tl.load(key_norm + HALF_DIM + element, mask=in_half, other=0.0)
        by_first = tl.where(is_query, query_first[None, :], key_first[None, :])
        by_second = tl.where(
            is_query, query_second.to(tl.float32)[None, :], key_second.to(tl.float32)[None, :]
        )
        first = tl.where(is_rotated, first * scale * by_first, first)
        second = tl.where(is_rotated, second * scale * by_second, second)

    angle = token * rotation_stride + element
    cosine = tl.load(cosines + angle, mask=in_half, other=0.0)[None, :]
    sine = tl.load(sines + angle, mask=in_half, other=0.0)[None, :]
    turned = tl.where(is_rotated, first * cosine - second * sine, first)
    second = tl.where(is_rotated, second * cosine + first * sine, second)
    first = turned

    queries = inside & is_query
    tl.store(place, first.to(heads.dtype.element_ty), mask=queries)
    tl.store(place + HALF_DIM, second.to(heads.dtype.element_ty), mask=queries)

    slot = tl.load(slots + token)
    stored = (head >= NUM_QUERIES) & (head < NUM_QUERIES + 2 * NUM_KEYS) & (slot >= 0)
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    index = head - NUM_QUERIES
    pair = index // NUM_KEYS
    index = index % NUM_KEYS
    if SCALED:
        largest = tl.max(tl.maximum(tl.abs(first), tl.abs(second)), 1)
        scale = tl.maximum(largest, 1e-30) / MAX_SCALED
        # The maximum ignores NaN, but the scale must become NaN for such a head.
        numbers = (tl.abs(first) < float("inf")) & (tl.abs(second) < float("inf"))
        finite = tl.min(numbers.to(tl.int32), 1) != 0
        scale = tl.where(finite, scale, float("nan"))
        first = tl.where(finite[:, None], first / scale[:, None], 0.0)
        second = tl.where(finite[:, None], second / scale[:, None], 0.0)
        scale_place = (
            scales
            + block * scale_block_stride
            + offset * scale_offset_stride
            + pair * scale_pair_stride
            + index * scale_head_stride
        )
        tl.store(scale_place, scale, mask=stored)
    start = block * block_stride + offset * offset_stride
    start += pair * pair_stride + index * head_stride
    to = cache + start[:, None] + element[None, :]
    into = stored[:, None] & in_half[None, :]
    tl.store(to, first.to(cache.dtype.element_ty), mask=into)
    tl.store(to + HALF_DIM, second.to(cache.dtype.element_ty), mask=into)
