"""Batches for attention: lengths in, device tensors out, blocks scattered over the cache."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from millrace.engine.kernels.gpu.device_batch import FP8_MAX, CacheLayer, DeviceBatch


class Heads(NamedTuple):
    """The heads of a layer, and how many tokens a block of its cache has."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16


class AttentionInput(NamedTuple):
    """``queries``: [num_tokens, num_heads, head_dim]."""

    queries: torch.Tensor
    cache: CacheLayer
    batch: DeviceBatch


def attention_input(
    heads: Heads,
    lengths: Sequence[int],
    num_rows: Sequence[int],
    *,
    dtype: torch.dtype,
    fp8: bool,
    generator: torch.Generator,
) -> AttentionInput:
    """A batch of sequences of ``lengths`` tokens, the last ``num_rows`` of which are this step's.

    Sequences with one row must come first. All numbers are random; so is the order of the blocks.
    """
    device, size = generator.device, heads.block_size
    counts = [-(-length // size) for length in lengths]
    num_blocks = sum(counts)
    order = torch.randperm(num_blocks, device=device, generator=generator).int()
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32, device=device)
    for row, (end, count) in enumerate(zip(accumulate(counts), counts, strict=True)):
        tables[row, :count] = order[end - count : end]
    positions = torch.cat(
        [
            torch.arange(length - rows, length, device=device)
            for length, rows in zip(lengths, num_rows, strict=True)
        ]
    )
    owners = torch.repeat_interleave(
        torch.arange(len(lengths), device=device), torch.tensor(num_rows, device=device)
    )
    slots = tables[owners, positions // size].long() * size + positions % size
    starts = [0, *accumulate(num_rows)]
    queries = torch.randn(
        starts[-1], heads.num_heads, heads.head_dim, device=device, generator=generator
    )
    batch = DeviceBatch(
        token_ids=torch.zeros_like(positions),
        positions=positions,
        slots=slots,
        query_starts=torch.tensor(starts, dtype=torch.int32, device=device),
        lengths=torch.tensor(lengths, dtype=torch.int32, device=device),
        table_rows=torch.arange(len(lengths), dtype=torch.int32, device=device),
        block_tables=tables,
        num_single=sum(rows == 1 for rows in num_rows),
    )
    cache = random_layer(heads, num_blocks, dtype=dtype, fp8=fp8, generator=generator)
    return AttentionInput(queries.to(dtype), cache, batch)


def random_layer(
    heads: Heads, num_blocks: int, *, dtype: torch.dtype, fp8: bool, generator: torch.Generator
) -> CacheLayer:
    """One layer's cache, full of random numbers."""
    shape = (num_blocks, heads.block_size, 2, heads.num_kv_heads, heads.head_dim)
    data = torch.empty(shape, dtype=dtype, device=generator.device)
    data.normal_(generator=generator)
    if not fp8:
        return CacheLayer(data, None)
    scales = data.abs().amax(-1).float() / FP8_MAX
    return CacheLayer((data / scales[..., None]).to(torch.float8_e4m3fn), scales)


def bytes_read(heads: Heads, lengths: Sequence[int], *, fp8: bool, dtype: torch.dtype) -> int:
    """Keys and values of all tokens, with their scales."""
    element = heads.head_dim + 4 if fp8 else heads.head_dim * dtype.itemsize
    return sum(lengths) * 2 * heads.num_kv_heads * element


def attention_flops(heads: Heads, lengths: Sequence[int], num_rows: Sequence[int]) -> int:
    """Two products for each pair of a row and a token that it sees."""
    pairs = sum(
        rows * (2 * length - rows + 1) // 2 for length, rows in zip(lengths, num_rows, strict=True)
    )
    return 4 * heads.num_heads * heads.head_dim * pairs
