"""Paged attention: the kernels against plain torch, and plain torch against torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.engine.kernels.gpu.attention import PagedAttention
from millrace.engine.kernels.gpu.attention_shape import AttentionShape
from millrace.engine.kernels.gpu.reference.attention import ReferenceAttention
from tests.engine.kernels.gpu.attention_cases import (
    FP8,
    Case,
    Shape,
    Story,
    attended,
    expected,
    make_attention,
    make_case,
    make_story,
)
from tests.engine.kernels.gpu.closeness import assert_close


def make(shape: Shape, spans: list[tuple[int, int]], seed: int = 0, padding: int = 0) -> Case:
    """Make sequences of (rows of this step, length), 0 for padding; those of one row come first."""
    generator = torch.Generator().manual_seed(seed)
    parts: list[tuple[Story, int, int]] = []
    for num_rows, length in sorted(spans, key=lambda span: span[0] != 1):
        story = make_story(shape, length, generator)
        start = max(0, length - num_rows)
        parts.append((story, start, start + num_rows))
    return make_case(shape, parts, generator, num_padding_rows=padding)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    num_kv_heads = draw(st.sampled_from((1, 1, 2)))
    return Shape(
        num_heads=num_kv_heads * draw(st.integers(1, 8)),
        num_kv_heads=num_kv_heads,
        head_dim=draw(st.sampled_from((64, 80, 128, 256))),
        block_size=draw(st.sampled_from((16, 16, 1, 12, 32, 128))),
        dtype=draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float16))),
        cache_dtype=draw(st.sampled_from((None, None, FP8))),
        window=draw(st.sampled_from((None, None, 1, 7, 64, 100))),
        softcap=draw(st.sampled_from((None, None, 5.0, 50.0))),
    )


# Lengths about the edges of blocks and of tiles of keys, and a few much longer ones.
LENGTHS = st.sampled_from((1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 130, 300))
# Rows of a sequence and its length; 0 is padding.
SPANS = st.one_of(
    st.tuples(st.just(1), st.one_of(LENGTHS, st.just(0))),
    st.builds(
        lambda length, part: (max(1, length * part // 4), length), LENGTHS, st.integers(1, 4)
    ),
    st.tuples(st.integers(0, 3), st.just(0)),
)


@given(
    shape=shapes(),
    spans=st.lists(SPANS, min_size=1, max_size=3),
    num_programs=st.integers(1, 24),
    padding=st.integers(0, 3),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=15, deadline=None)
def test_kernels_agree_with_the_reference(
    shape: Shape, spans: list[tuple[int, int]], num_programs: int, padding: int, seed: int
) -> None:
    case = make(shape, spans, seed, padding)
    attention = make_attention(shape, num_programs=num_programs)
    assert_close(attended(attention, case), expected(shape, case))


@given(shape=shapes(), spans=st.lists(SPANS, min_size=1, max_size=3), seed=st.integers(0, 2**32))
@settings(max_examples=10, deadline=None)
def test_the_deterministic_kernel_agrees_with_the_reference(
    shape: Shape, spans: list[tuple[int, int]], seed: int
) -> None:
    case = make(shape, spans, seed)
    attention = make_attention(shape, deterministic=True)
    assert_close(attended(attention, case), expected(shape, case))


@pytest.mark.parametrize("num_programs", [1, 5, 16, 61])
@pytest.mark.parametrize("window", [None, 200])
def test_skewed_lengths_are_shared_out(num_programs: int, window: int | None) -> None:
    """Many programs share the longest sequence, and some programs have many sequences."""
    shape = Shape(window=window)
    case = make(shape, [(1, 30), (1, 1), (1, 1500), (1, 0), (1, 129), (1, 128), (1, 2)])
    attention = make_attention(shape, num_programs=num_programs)
    assert_close(attended(attention, case), expected(shape, case))


def test_large_scores_neither_overflow_nor_vanish() -> None:
    shape = Shape()
    case = make(shape, [(1, 200), (70, 140)])
    case.queries[: case.num_rows].mul_(1000)
    # Scores about 1,000 are known to 1e-4, and so are the weights.
    torch.testing.assert_close(
        attended(make_attention(shape), case), expected(shape, case), atol=2e-3, rtol=2e-3
    )


def test_layers_have_windows_of_their_own() -> None:
    windows = [None, 40, None, 3]
    attention = PagedAttention(
        AttentionShape(
            num_heads=4,
            num_kv_heads=2,
            head_dim=64,
            block_size=16,
            windows=windows,
        ),
        max_sequences=4,
        num_programs=8,
        device=torch.device("cpu"),
    )
    case = make(Shape(), [(1, 600), (1, 20), (50, 180)])
    work = attention.prepare(case.batch)
    for layer, window in enumerate(windows):
        out = torch.full(case.queries.shape, torch.nan)
        attention.attend(layer, case.queries, case.cache, case.batch, work, out)
        assert_close(out, expected(Shape(window=window), case))


def test_a_group_of_more_heads_than_a_tile_has_rows_at_least() -> None:
    shape = Shape(num_heads=40, num_kv_heads=1)
    case = make(shape, [(1, 70), (9, 90)])
    assert_close(attended(make_attention(shape), case), expected(shape, case))


@pytest.mark.parametrize("num_tokens", [1, 50])
def test_the_reference_agrees_with_torch(num_tokens: int) -> None:
    shape = Shape()
    generator = torch.Generator().manual_seed(1)
    story = make_story(shape, 50, generator)
    case = make_case(shape, [(story, 50 - num_tokens, 50)], generator)
    keys, values = (part.transpose(0, 1).repeat_interleave(2, 0) for part in story.pairs.unbind(1))
    theirs = F.scaled_dot_product_attention(
        story.queries.transpose(0, 1), keys, values, is_causal=True
    )
    assert_close(expected(shape, case), theirs.transpose(0, 1)[-num_tokens:])


def test_the_reference_has_the_same_interface() -> None:
    reference = ReferenceAttention(
        AttentionShape(
            num_heads=4,
            num_kv_heads=2,
            head_dim=64,
            block_size=16,
            windows=[None, 8],
        ),
        max_sequences=4,
        num_programs=8,
        device=torch.device("cpu"),
    )
    case = make(Shape(), [(1, 20), (3, 0)], padding=2)
    out = torch.full(case.queries.shape, torch.nan)
    reference.prepare(case.batch)
    reference.attend(1, case.queries, case.cache, case.batch, None, out)
    assert_close(out[:4], expected(Shape(window=8), case))
    assert out[4:].isnan().all()


@pytest.mark.parametrize(
    "wrong", [{"num_heads": 3}, {"scale": 0.0}, {"softcap": -1.0}, {"windows": [0]}]
)
def test_what_no_model_has_is_refused(wrong: dict[str, object]) -> None:
    arguments: dict[str, object] = {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 64,
        "block_size": 16,
        "windows": [None],
    }
    with pytest.raises(ValueError, match=r"heads|positive|windows"):
        AttentionShape(**(arguments | wrong))  # type: ignore[arg-type]
