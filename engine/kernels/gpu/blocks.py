"""Copies of blocks of the KV cache, in all layers at once."""

from __future__ import annotations

import torch

from millrace.engine.kernels.gpu.jit.blocks import copy_blocks_kernel
from millrace.engine.kernels.gpu.tiles import COPY_WARPS, COPY_WORDS, power_of_two

# From the widest: a thread loads two of eight bytes at once.
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def copy_blocks(
    source: torch.Tensor,
    target: torch.Tensor,
    source_ids: torch.Tensor,
    target_ids: torch.Tensor,
) -> None:
    """Give block ``target_ids[i]`` of ``target`` [num_layers, M, ...] the contents of block
    ``source_ids[i]`` of ``source`` [num_layers, N, ...], in every layer.

    Both may be the same tensor, but no block may be both read and written, nor written twice.
    A block is contiguous in a layer; layers and blocks may lie apart. Either tensor may be locked
    memory of the host, which the device then reads or writes itself. The ids: int64 [num_pairs],
    on the device. Returns when the copy is queued on the current stream. Each byte is read once
    and written once; between device and host their link is the limit.
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
    """Whether blocks can be seen as so wide words."""
    lengths = (blocks.shape[2], blocks.stride(0), blocks.stride(1), blocks.storage_offset())
    return word.itemsize >= blocks.itemsize and all(
        length * blocks.itemsize % word.itemsize == 0 for length in lengths
    )
