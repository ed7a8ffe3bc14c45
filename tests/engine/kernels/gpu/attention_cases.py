"""Batches for attention: caches hold readable contents only, and all else is poison."""

from __future__ import annotations

from typing import NamedTuple

import torch

from millrace.engine.kernels.gpu.attention import PagedAttention
from millrace.engine.kernels.gpu.attention_shape import AttentionShape
from millrace.engine.kernels.gpu.device_batch import CacheLayer, DeviceBatch
from millrace.engine.kernels.gpu.reference.attention import attend
from tests.engine.kernels.gpu.closeness import poisoned

# A block that no cache has: its lookup reads far outside of the memory.
NO_BLOCK = 2**30
FP8 = torch.float8_e4m3fn


class Shape(NamedTuple):
    """Sizes of attention that are fixed for a model."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    window: int | None = None
    softcap: float | None = None


class Story(NamedTuple):
    """Sequence with keys and values [num_tokens, 2, num_kv_heads, head_dim], their scales
    [num_tokens, 2, num_kv_heads] or None, and a query of each token [num_tokens, num_heads,
    head_dim]."""

    pairs: torch.Tensor
    scales: torch.Tensor | None
    queries: torch.Tensor


class Case(NamedTuple):
    queries: torch.Tensor
    cache: CacheLayer
    batch: DeviceBatch

    @property
    def num_rows(self) -> int:
        return int(self.batch.query_starts[-1])


def make_story(shape: Shape, num_tokens: int, generator: torch.Generator) -> Story:
    pairs = torch.randn(num_tokens, 2, shape.num_kv_heads, shape.head_dim, generator=generator)
    scales = None
    if shape.cache_dtype is not None:
        scales = 0.5 + torch.rand(pairs.shape[:-1], generator=generator)
    queries = torch.randn(num_tokens, shape.num_heads, shape.head_dim, generator=generator)
    return Story(pairs.to(shape.cache_dtype or shape.dtype), scales, queries.to(shape.dtype))


def make_case(
    shape: Shape,
    parts: list[tuple[Story, int, int]],
    generator: torch.Generator,
    *,
    num_padding_rows: int = 0,
) -> Case:
    """Make a step of one part of each story: its tokens ``start`` … ``end - 1``, with all earlier
    tokens in the cache. An empty story is padding, which has ``end - start`` rows nevertheless.

    Parts of one token must come first. Blocks lie in any order, and so do the tables' rows.
    """
    size = shape.block_size
    num_single = sum(end - start == 1 for _, start, end in parts)
    assert all(end - start == 1 for _, start, end in parts[:num_single])
    counts = [-(-min(end, len(story.pairs)) // size) for story, _, end in parts]
    free = torch.randperm(sum(counts) + 2, generator=generator).tolist()
    dtype = shape.cache_dtype or shape.dtype
    blocks = (len(free), size, 2, shape.num_kv_heads)
    data = poisoned(*blocks, shape.head_dim, dtype=dtype)
    scales = None if shape.cache_dtype is None else poisoned(*blocks, dtype=torch.float32)
    tables = torch.full((len(parts) + 2, max([*counts, 1])), NO_BLOCK, dtype=torch.int32)
    table_rows = torch.randperm(len(tables), generator=generator)[: len(parts)]
    starts, lengths, queries = [0], [], []
    for (story, start, end), count, table_row in zip(parts, counts, table_rows, strict=True):
        length = min(end, len(story.pairs))
        for index in range(count):
            block = free.pop()
            tables[table_row, index] = block
            stored = slice(index * size, min((index + 1) * size, length))
            data[block, : stored.stop - stored.start] = story.pairs[stored]
            if scales is not None and story.scales is not None:
                scales[block, : stored.stop - stored.start] = story.scales[stored]
        padding = poisoned(end - start, shape.num_heads, shape.head_dim, dtype=shape.dtype)
        queries.append(story.queries[start:end] if length else padding)
        starts.append(starts[-1] + end - start)
        lengths.append(length)
    num_rows = starts[-1] + num_padding_rows
    # Beside one another, as a product of fused weights makes them.
    num_fused = shape.num_heads + 2 * shape.num_kv_heads
    heads = poisoned(num_rows, num_fused, shape.head_dim, dtype=shape.dtype)
    heads[: starts[-1], : shape.num_heads] = torch.cat(queries)
    unused = torch.zeros(num_rows, dtype=torch.int64)
    batch = DeviceBatch(
        *(unused, unused, unused),
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        table_rows.to(torch.int32),
        tables,
        num_single,
    )
    return Case(heads[:, : shape.num_heads], CacheLayer(data, scales), batch)


def make_attention(
    shape: Shape, *, num_programs: int = 6, deterministic: bool = False
) -> PagedAttention:
    """Return the attention of a model of one layer, with poisoned scratch memory."""
    attention = PagedAttention(
        AttentionShape(
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            block_size=shape.block_size,
            windows=[shape.window],
            softcap=shape.softcap,
        ),
        max_sequences=64,
        num_programs=num_programs,
        device=torch.device("cpu"),
        deterministic=deterministic,
    )
    for scratch in (attention._totals, attention._stats):
        scratch.fill_(torch.nan)
    return attention


def attended(attention: PagedAttention, case: Case) -> torch.Tensor:
    """Run the kernels into poisoned memory and return its rows; padding rows must stay poison."""
    out = poisoned(*case.queries.shape, dtype=case.queries.dtype)
    attention.attend(0, case.queries, case.cache, case.batch, attention.prepare(case.batch), out)
    assert out[case.num_rows :].isnan().all()
    return out[: case.num_rows]


def expected(shape: Shape, case: Case) -> torch.Tensor:
    scale = shape.head_dim**-0.5
    result = attend(
        *(case.queries, case.cache, case.batch),
        window=shape.window,
        softcap=shape.softcap,
        scale=scale,
    )
    return result[: case.num_rows]
