"""RMSNorm and RoPE of query and key heads, and the store of keys and values in the cache."""

from __future__ import annotations

import torch

from millrace.engine.kernels.gpu.device_batch import FP8_MAX, CacheLayer
from millrace.engine.kernels.gpu.reference.rows import rms_norm
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
    """See ``engine.kernels.gpu.heads``."""
    block_size, num_keys = cache.data.shape[1], cache.data.shape[3]
    num_queries = heads.shape[1] - 2 * num_keys
    queries, keys = heads[:, :num_queries].float(), heads[:, num_queries:-num_keys].float()
    values = heads[:, -num_keys:].float()
    if norms is not None:
        queries = rms_norm(queries, norms.query, epsilon)
        keys = rms_norm(keys, norms.key, epsilon)
    heads[:, :num_queries] = _rotated(queries, cosines, sines).to(heads.dtype)
    pairs = torch.stack((_rotated(keys, cosines, sines), values), 1)

    kept = slots >= 0
    blocks, offsets = slots[kept] // block_size, slots[kept] % block_size
    pairs = pairs[kept]
    if cache.scales is not None:
        scales = pairs.abs().amax(-1).clamp_min(1e-30) / FP8_MAX
        scales = torch.where(pairs.isfinite().all(-1), scales, torch.nan)
        cache.scales[blocks, offsets] = scales
        pairs = (pairs / scales.unsqueeze(-1)).nan_to_num(0.0)
    # As bytes: not every operation knows every dtype.
    stored = pairs.to(cache.data.dtype).view(torch.uint8)
    cache.data.view(torch.uint8)[blocks, offsets] = stored


def _rotated(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    first, second = heads.chunk(2, -1)
    cosines, sines = cosines.unsqueeze(1), sines.unsqueeze(1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), -1)
