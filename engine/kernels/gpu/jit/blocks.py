"""Copies of blocks; one program copies a part of one block in one layer."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize_on_alignment=["source_ids", "target_ids"])
def copy_blocks_kernel(
    source,
    target,
    source_ids,
    target_ids,
    source_layer_stride,
    source_block_stride,
    target_layer_stride,
    target_block_stride,
    num_parts,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pair = tl.program_id(0) // num_parts
    part = tl.program_id(0) % num_parts
    layer = tl.program_id(1).to(tl.int64)
    words = part * BLOCK + tl.arange(0, BLOCK)
    inside = words < WORDS
    from_ = layer * source_layer_stride + tl.load(source_ids + pair) * source_block_stride
    to = layer * target_layer_stride + tl.load(target_ids + pair) * target_block_stride
    contents = tl.load(source + from_ + words, mask=inside)
    tl.store(target + to + words, contents, mask=inside)
