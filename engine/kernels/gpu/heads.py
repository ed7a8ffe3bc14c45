"""RMSNorm and RoPE of query and key heads, and the store of keys and values in the cache."""

from __future__ import annotations

import torch

from millrace.engine.kernels.gpu.device_batch import FP8_MAX, CacheLayer
from millrace.engine.kernels.gpu.jit.heads import rotate_store_kernel
from millrace.engine.kernels.gpu.tiles import head_tile
from millrace.engine.kernels.operations import HeadNorms


def rotate_store(
    heads: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    norms: HeadNorms | None,
    epsilon: float,
    cache: CacheLayer,
    slots: torch.Tensor,
) -> None:
    """Norm (with ``norms``) and rotate query and key heads, and store keys and values.

    Queries stay in place; key and value heads stay unchanged. Computed in float32 and rounded once.

    ``heads`` is [num_tokens, num_queries + 2 * num_kv_heads, head_dim], contiguous within a token.
    ``cosines`` and ``sines`` are float32 [num_tokens, head_dim / 2]. ``slots`` is int64
    [num_tokens], block * block_size + offset, or -1 to store nothing.

    In a cache with scales, a head's scale is its largest magnitude over FP8_MAX. A head with an
    element that is not finite is stored as zeros with the scale NaN.
    """
    num_tokens, num_heads, head_dim = heads.shape
    _, block_size, _, num_keys, _ = cache.data.shape
    if num_tokens == 0:
        return
    tile = head_tile(head_dim)
    query_norm, key_norm = (heads, heads) if norms is None else norms
    scales = cosines if cache.scales is None else cache.scales
    scale_strides = (0, 0, 0, 0) if cache.scales is None else cache.scales.stride()
    rotate_store_kernel[(num_tokens, -(-num_heads // tile.heads))](
        *(heads, cosines, sines, query_norm, key_norm, cache.data, scales, slots, epsilon),
        *(heads.stride(0), cosines.stride(0)),
        *cache.data.stride()[:4],
        *scale_strides,
        NUM_QUERIES=num_heads - 2 * num_keys,
        NUM_KEYS=num_keys,
        HALF_DIM=head_dim // 2,
        BLOCK_SIZE=block_size,
        NORMED=norms is not None,
        SCALED=cache.scales is not None,
        HEADS=tile.heads,
        HALF=tile.half,
        MAX_SCALED=FP8_MAX,
        num_warps=tile.num_warps,
    )
