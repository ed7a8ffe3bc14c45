"""Attention over the paged cache against plain attention over what a token may see."""

from __future__ import annotations

from typing import NamedTuple

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.engine.devices.cpu.attention import TorchAttention
from millrace.engine.kv.cache import KVCache
from millrace.engine.step.batch import FlatBatch, QueryRange
from millrace.registry.checkpoints.checkpoint import ModelConfig

HEAD_DIM = 4
DTYPE = torch.float32


class Shape(NamedTuple):
    num_kv_heads: int
    group_size: int
    block_size: int
    windows: list[int | None]


class Part(NamedTuple):
    """Part of a step: the next ``num_tokens`` of a sequence after ``num_context`` tokens in the
    cache."""

    num_context: int
    num_tokens: int


SHAPES = st.builds(
    Shape,
    num_kv_heads=st.integers(1, 2),
    group_size=st.integers(1, 3),
    block_size=st.sampled_from([1, 4, 16]),
    windows=st.lists(st.none() | st.integers(1, 40), min_size=1, max_size=3),
)
PARTS = st.lists(
    st.builds(Part, st.integers(0, 50), st.integers(1, 30) | st.just(1)), min_size=1, max_size=5
)


def seen_by_hand(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, part: Part, window: int | None
) -> torch.Tensor:
    """Compute attention token by token and head by head."""
    group_size = queries.shape[1] // keys.shape[1]
    rows = torch.empty_like(queries)
    for row in range(part.num_tokens):
        end = part.num_context + row + 1
        begin = 0 if window is None else max(0, end - window)
        for head in range(queries.shape[1]):
            seen = slice(begin, end), head // group_size
            scores = keys[seen] @ queries[row, head] / HEAD_DIM**0.5
            rows[row, head] = scores.softmax(0) @ values[seen]
    return rows


def lay_out(parts: list[Part], tables: list[list[int]]) -> FlatBatch:
    """Order single tokens first, by rising context, as ``build_batch`` does."""
    ranges: list[QueryRange] = []
    start = 0
    for part, table in zip(parts, tables, strict=True):
        ranges.append(QueryRange(start, part.num_tokens, part.num_context, table))
        start += part.num_tokens
    none = torch.empty(0, dtype=torch.int64)
    num_single = sum(part.num_tokens == 1 for part in parts)
    return FlatBatch(
        token_ids=none,
        positions=none,
        ranges=ranges,
        num_single=num_single,
        sampled_rows=none,
        sampled=[],
        pooled=[],
        scored=[],
    )


@settings(max_examples=60, deadline=None)
@given(shape=SHAPES, parts=PARTS, data=st.data())
def test_each_token_sees_its_window(shape: Shape, parts: list[Part], data: st.DataObject) -> None:
    parts = sorted(parts, key=lambda part: (part.num_tokens > 1, part.num_context))
    size = shape.block_size
    counts = [-(-sum(part) // size) for part in parts]
    free = data.draw(st.permutations(range(sum(counts))))
    tables = [[free.pop() for _ in range(count)] for count in counts]
    cache = KVCache(
        ModelConfig(
            architecture="LlamaForCausalLM",
            hidden_size=8,
            num_hidden_layers=len(shape.windows),
            num_attention_heads=shape.num_kv_heads * shape.group_size,
            num_key_value_heads=shape.num_kv_heads,
            head_dim=HEAD_DIM,
            intermediate_size=8,
            vocab_size=8,
            max_position_embeddings=128,
        ),
        num_blocks=sum(counts),
        block_size_tokens=size,
        dtype=DTYPE,
        device=torch.device("cpu"),
    )
    attention = TorchAttention(
        cache,
        num_heads=shape.num_kv_heads * shape.group_size,
        dtype=DTYPE,
        windows=shape.windows,
    )
    attention_metadata = attention.prepare(lay_out(parts, tables))
    generator = torch.Generator().manual_seed(1)
    for layer, window in enumerate(shape.windows):
        stored = [
            torch.randn(sum(part), 2 * shape.num_kv_heads, HEAD_DIM, generator=generator)
            for part in parts
        ]
        for part, table, tokens in zip(parts, tables, stored, strict=True):
            for position in range(part.num_context):
                block = cache.data[layer, table[position // size], position % size]
                block.copy_(tokens[position].view(block.shape))
        num_rows = sum(part.num_tokens for part in parts)
        queries = torch.randn(num_rows, attention.num_heads, HEAD_DIM, generator=generator)
        new = torch.cat([t[p.num_context :] for p, t in zip(parts, stored, strict=True)])
        attended = attention.attend(layer, queries, new, attention_metadata).view(queries.shape)
        start = 0
        for part, tokens in zip(parts, stored, strict=True):
            rows = slice(start, start + part.num_tokens)
            keys, values = tokens.chunk(2, 1)
            expected = seen_by_hand(queries[rows], keys, values, part, window)
            torch.testing.assert_close(attended[rows], expected, rtol=1e-4, atol=1e-5)
            start = rows.stop
