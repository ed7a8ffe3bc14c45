"""Partition of the decode kernel's work into shares."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.engine.kernels.gpu.attention import AttentionWork, PagedAttention
from millrace.engine.kernels.gpu.attention_shape import AttentionShape
from millrace.engine.kernels.gpu.attention_tiles import decode_tokens
from millrace.engine.kernels.gpu.device_batch import DeviceBatch

HEAD_DIM = 256
TILE = decode_tokens(HEAD_DIM)


def single_rows(lengths: list[int]) -> DeviceBatch:
    unused = torch.zeros(len(lengths), dtype=torch.int64)
    return DeviceBatch(
        *(unused, unused, unused),
        torch.arange(len(lengths) + 1, dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        torch.arange(len(lengths), dtype=torch.int32),
        torch.zeros(len(lengths), 1, dtype=torch.int32),
        len(lengths),
    )


def cut(
    lengths: list[int], windows: list[int | None], num_programs: int, num_kv_heads: int = 1
) -> AttentionWork:
    attention = PagedAttention(
        AttentionShape(
            num_heads=num_kv_heads,
            num_kv_heads=num_kv_heads,
            head_dim=HEAD_DIM,
            block_size=16,
            windows=windows,
        ),
        max_sequences=1000,
        num_programs=num_programs,
        device=torch.device("cpu"),
    )
    return attention.prepare(single_rows(lengths))


def tiles_of(length: int, window: int | None) -> int:
    """Count the tiles of keys that the last token sees; 1 for padding, which has zeros to write."""
    first = 0 if window is None else max(0, length - window) // TILE
    return max(1, -(-length // TILE) - first)


@given(
    lengths=st.lists(st.integers(0, 20 * TILE), min_size=1, max_size=40),
    windows=st.lists(st.one_of(st.none(), st.integers(1, 10 * TILE)), min_size=1, max_size=3),
    num_shares=st.integers(1, 40),
)
@settings(max_examples=25, deadline=None)
def test_every_tile_lies_in_one_share_and_shares_are_even(
    lengths: list[int], windows: list[int | None], num_shares: int
) -> None:
    work = cut(lengths, windows, num_shares)
    by_length = sorted(set(windows), key=lambda window: window or 2**31)
    for window, starts, firsts in zip(by_length, *map(torch.Tensor.tolist, work), strict=True):
        counts = [tiles_of(length, window) for length in lengths]
        assert starts == [sum(counts[:index]) for index in range(len(lengths) + 1)]
        total = starts[-1]
        edges = [share * total // num_shares for share in range(num_shares + 1)]
        sizes = [end - start for start, end in itertools.pairwise(edges)]
        assert sum(sizes) == total
        assert max(sizes) - min(sizes) <= 1
        # A share walks on from the sequence and the tile at which it begins.
        visited: list[tuple[int, int]] = []
        for first, start, end in zip(firsts, edges, edges[1:], strict=False):
            sequence = first
            assert start == end or starts[sequence] <= start < starts[sequence + 1]
            for tile in range(start, end):
                while tile >= starts[sequence + 1]:
                    sequence += 1
                visited.append((sequence, tile - starts[sequence]))
        everything = [(index, tile) for index, n in enumerate(counts) for tile in range(n)]
        assert visited == everything


def test_more_sequences_than_one_program_counts_at_a_time() -> None:
    lengths = [(index * 37) % 500 for index in range(600)]
    work = cut(lengths, [None], 5)
    counts = torch.tensor([tiles_of(length, None) for length in lengths])
    assert torch.equal(work.tile_starts[0, 1:].long(), counts.cumsum(0))


def test_shares_of_all_key_heads_are_as_many_as_programs() -> None:
    assert cut([100], [None], 264, num_kv_heads=8).first_sequences.shape == (1, 33)
    assert cut([100], [None], 3, num_kv_heads=8).first_sequences.shape == (1, 1)


def test_more_sequences_than_announced_are_refused() -> None:
    with pytest.raises(ValueError, match="1001 sequences of one row"):
        cut([1] * 1001, [None], 4)
