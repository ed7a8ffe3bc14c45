"""Tile shapes of the attention kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch

from millrace.engine.kernels.gpu.tiles import power_of_two


class AttentionTile(NamedTuple):
    """``rows``: of queries, tokens times the query heads that share a key head; ``tokens``: keys
    and values that one step of the loop takes."""

    rows: int
    tokens: int
    num_warps: int
    num_stages: int


def padded(size: int) -> int:
    """The power of two at or above ``size``, and 16 at least: what a matrix instruction takes."""
    return max(16, power_of_two(size))


def decode_tokens(head_dim: int) -> int:
    """Keys and values that one step of the decode kernel takes, of any dtype."""
    width = padded(head_dim)
    if width <= 64:
        return 128
    return 64 if width <= 128 else 32


def decode_tile(head_dim: int, group: int, cache_dtype: torch.dtype) -> AttentionTile:
    """Of such a size that two programs fit one multiprocessor, each with three tiles of keys and
    values on their way; of bytes in the widest heads only one does, for their registers."""
    tokens = decode_tokens(head_dim)
    rows = padded(group)
    if cache_dtype.itemsize == 4:
        return AttentionTile(rows, tokens, 16, 2)
    if cache_dtype.itemsize == 1:
        # Bytes become numbers on their way from shared memory to shared memory, whence the
        # instruction for 64 rows takes them; for that of 16 each thread would gather bytes singly.
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
    """Tiles that keep the tensor cores busy; in the deterministic mode one size that also suits
    single rows."""
    width = padded(head_dim)
    rows = padded(group)
    if dtype.itemsize == 4:
        return AttentionTile(max(rows, 32), 16, 8, 2)
    tokens = 32 if width > 128 else 64
    if cache_dtype.itemsize == 1 and width > 64:
        # What bytes become takes registers, of which larger tiles leave none.
        return AttentionTile(max(rows, 64), tokens, 8 if width > 128 else 4, 3)
    if deterministic:
        return AttentionTile(max(rows, 64), tokens, 4, 3)
    return AttentionTile(max(rows, 128), 128 if width <= 64 else tokens, 8, 3)


def masks_all_tiles(head_dim: int, cache_dtype: torch.dtype) -> bool:
    """Whether the prefill kernel has one loop over all tiles of keys, with masks, instead of one
    without for those that need none: several of the largest take too many registers."""
    return cache_dtype.itemsize == 1 and padded(head_dim) > 128
