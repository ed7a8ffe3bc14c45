"""Copies of blocks of the KV cache, in all layers at once."""

from __future__ import annotations

import torch

from millrace.engine.kernels.gpu.jit.blocks import copy_blocks_kernel
from millrace.engine.kernels.gpu.tiles import COPY_WARPS, COPY_WORDS, power_of_two

# Widest first: a thread loads two words of eight bytes at once.
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def copy_blocks(
    source: torch.Tensor,
    target: torch.Tensor,
    source_ids: torch.Tensor,
    target_ids: torch.Tensor,
) -> None:
    """Copy block ``source_ids[i]`` to block ``target_ids[i]`` in every layer.

    ``source`` is [num_layers, N, ...] and ``target`` [num_layers, M, ...]. They may be one tensor,
    but no block may be both read and written, or written twice. A block is contiguous in a layer;
    layers and blocks may be strided. Either tensor may be pinned host memory, which the device
    accesses directly. The ids are int64 [num_pairs] on the device. Returns when the copy is queued
    on the current stream. Each byte is read once and written once, so between device and host the
    link is the limit.
    """
    num_pairs, num_layers = source_ids.shape[0], source.shape[0]
    source, target = source.flatten(2), target.flatten(2)
    word = next(word for word in _WORDS if _divides(word, source) and _divides(word, target))
    source, target = source.view(word), target.view(word)
    num_words = source.shape[2]
    if num_pairs == 0:
        return
    block = min(COPY_WORDS, power_of_two(num_words))
    num_parts = -(-num_words // block)
    copy_blocks_kernel[(num_pairs * num_parts, num_layers)](
        *(source, target, source_ids, target_ids),
        *(source.stride(0), source.stride(1), target.stride(0), target.stride(1)),
        num_parts,
        WORDS=num_words,
        BLOCK=block,
        num_warps=COPY_WARPS,
    )


def _divides(word: torch.dtype, blocks: torch.Tensor) -> bool:
    """Return whether blocks can be viewed as words of this width."""
    lengths = (blocks.shape[2], blocks.stride(0), blocks.stride(1), blocks.storage_offset())
    return word.itemsize >= blocks.itemsize and all(
        length * blocks.itemsize % word.itemsize == 0 for length in lengths
    )
