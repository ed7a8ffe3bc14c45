"""Deterministic attention: a row's result has the same bits in every step."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.kernels.gpu.attention_cases import (
    FP8,
    Shape,
    Story,
    attended,
    make_attention,
    make_case,
    make_story,
)
from tests.support.engine.triton_products import rows_by_themselves

LENGTH = 135


def rows_of(
    shape: Shape,
    parts: list[tuple[Story, int, int]],
    wanted: int,
    generator: torch.Generator,
) -> torch.Tensor:
    """Return the attention of the part at index ``wanted``, in a step of these parts."""
    case = make_case(shape, parts, generator)
    attention = make_attention(shape, num_programs=8, deterministic=True)
    start, end = case.batch.query_starts[wanted : wanted + 2].tolist()
    with rows_by_themselves():
        return attended(attention, case)[start:end]


@st.composite
def cuts(draw: st.DrawFn) -> list[int]:
    """Draw the cuts of a story into steps: chunks of any size, and perhaps some single tokens."""
    edges = draw(st.lists(st.integers(1, LENGTH - 1), max_size=2))
    first_single = draw(st.sampled_from((LENGTH, LENGTH - 1, 127)))
    singles = list(range(first_single, min(first_single + 2, LENGTH)))
    return sorted({0, LENGTH, *edges, *singles})


@given(
    shape=st.builds(
        Shape,
        num_heads=st.sampled_from((1, 3, 4)),
        num_kv_heads=st.just(1),
        head_dim=st.sampled_from((64, 80)),
        block_size=st.just(16),
        dtype=st.sampled_from((torch.float32, torch.bfloat16)),
        cache_dtype=st.sampled_from((None, FP8)),
        window=st.sampled_from((None, 70)),
        softcap=st.sampled_from((None, 20.0)),
    ),
    edges=cuts(),
    company=st.lists(st.sampled_from((1, 70)), max_size=2),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=4, deadline=None)
def test_chunks_and_company_change_nothing(
    shape: Shape, edges: list[int], company: list[int], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    story = make_story(shape, LENGTH, generator)
    whole = rows_of(shape, [(story, 0, LENGTH)], 0, generator)
    others = [make_story(shape, length, generator) for length in company]
    for start, end in itertools.pairwise(edges):
        singles = [(other, len(other.pairs) - 1, len(other.pairs)) for other in others]
        chunks = [(other, 0, len(other.pairs)) for other in others if len(other.pairs) > 1]
        parts = [*singles, (story, start, end), *chunks]
        chunk = rows_of(shape, parts, len(singles), generator)
        assert torch.equal(chunk, whole[start:end])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prefill_and_decode_agree(dtype: torch.dtype) -> None:
    """Rows of single-token steps, as generated, equal the rows of one step, as prompted."""
    shape = Shape(num_kv_heads=1, dtype=dtype)
    generator = torch.Generator().manual_seed(3)
    story = make_story(shape, 7, generator)
    whole = rows_of(shape, [(story, 0, 7)], 0, generator)
    for token in range(7):
        row = rows_of(shape, [(story, token, token + 1)], 0, generator)
        assert torch.equal(row, whole[token : token + 1])
