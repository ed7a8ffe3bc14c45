"""Tile shapes of the attention kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch

from millrace.engine.kernels.gpu.tiles import power_of_two


class AttentionTile(NamedTuple):
    """Tile shape of attention.

    ``rows`` counts queries: tokens times the query heads that share a key head. ``tokens`` is the
    number of keys and values of one turn of the loop.
    """

    rows: int
    tokens: int
    num_warps: int
    num_stages: int


def padded(size: int) -> int:
    """Return the power of two at or above ``size``, at least 16, as matrix instructions require."""
    return max(16, power_of_two(size))


def decode_tokens(head_dim: int) -> int:
    """Return the keys and values of one turn of the decode kernel, for any dtype."""
    width = padded(head_dim)
    if width <= 64:
        return 128
    return 64 if width <= 128 else 32


def decode_tile(head_dim: int, group: int, cache_dtype: torch.dtype) -> AttentionTile:
    """Return a tile of which two programs fit one multiprocessor, each with three tiles in flight.

    For 8-bit caches with the widest heads, only one program fits, because of its registers.
    """
    tokens = decode_tokens(head_dim)
    rows = padded(group)
    if cache_dtype.itemsize == 4:
        return AttentionTile(rows, tokens, 16, 2)
    if cache_dtype.itemsize == 1:
        # 8-bit entries are converted from shared memory to shared memory, where the instruction for
        # 64 rows reads them. For the instruction for 16 rows, each thread would gather single
        # bytes.
        rows = max(rows, 64)
        return AttentionTile(rows, tokens, 8 if padded(head_dim) > 128 else 4, 4)
    return AttentionTile(rows, tokens, 4, 4 if rows <= 32 else 3)


def prefill_tile(
    head_dim: int,
    group: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    *,
    deterministic: bool,
) -> AttentionTile:
    """Return a tile that keeps the tensor cores busy.

    The deterministic mode has one size, which also suits single rows.
    """
    width = padded(head_dim)
    rows = padded(group)
    if dtype.itemsize == 4:
        return AttentionTile(max(rows, 32), 16, 8, 2)
    tokens = 32 if width > 128 else 64
    if cache_dtype.itemsize == 1 and width > 64:
        # Converted bytes need registers, and larger tiles leave none.
        return AttentionTile(max(rows, 64), tokens, 8 if width > 128 else 4, 3)
    if deterministic:
        return AttentionTile(max(rows, 64), tokens, 4, 3)
    return AttentionTile(max(rows, 128), 128 if width <= 64 else tokens, 8, 3)


def masks_all_tiles(head_dim: int, cache_dtype: torch.dtype) -> bool:
    """Return whether the prefill kernel has one masked loop over all tiles of keys.

    Otherwise it has an unmasked loop for tiles that need no mask. Several loops over the largest
    tiles take too many registers.
    """
    return cache_dtype.itemsize == 1 and padded(head_dim) > 128
