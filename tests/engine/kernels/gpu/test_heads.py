"""Norm, rotation and storing of heads beside the reference; nothing else is written."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.engine.kernels.gpu.device_batch import FP8_MAX, CacheLayer
from millrace.engine.kernels.gpu.heads import rotate_store
from millrace.engine.kernels.gpu.reference import operations as reference
from millrace.engine.kernels.operations import HeadNorms
from tests.engine.kernels.gpu.closeness import DTYPES, assert_close, poisoned

EPSILON = 1e-6
FP8 = torch.float8_e4m3fn


def cache_layer(
    num_blocks: int, block_size: int, num_keys: int, head_dim: int, dtype: torch.dtype
) -> CacheLayer:
    """Return a layer full of poison, with poison between its blocks, too."""
    shape = (num_blocks + 1, block_size + 1, 2, num_keys, head_dim)
    data = poisoned(*shape, dtype=dtype)[:num_blocks, :block_size]
    if dtype is not FP8:
        return CacheLayer(data, None)
    return CacheLayer(data, poisoned(*shape[:-1], dtype=torch.float32)[:num_blocks, :block_size])


def numbers(layer: CacheLayer) -> torch.Tensor:
    """Return the values that the cache's contents represent, in float32."""
    values = layer.data.float()
    return values if layer.scales is None else values * layer.scales.unsqueeze(-1)


def rotation(num_tokens: int, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.rand(num_tokens, half) * 100
    return angles.cos(), angles.sin()


@settings(deadline=None, max_examples=40)
@given(
    num_tokens=st.integers(0, 5),
    num_keys=st.integers(1, 3),
    group=st.integers(1, 5),
    head_dim=st.sampled_from([64, 80, 128, 256]),
    dtype=st.sampled_from(DTYPES),
    fp8=st.booleans(),
    normed=st.booleans(),
    block_size=st.sampled_from([1, 3, 16]),
    data=st.data(),
)
def test_as_the_reference(
    num_tokens: int,
    num_keys: int,
    group: int,
    head_dim: int,
    dtype: torch.dtype,
    fp8: bool,
    normed: bool,
    block_size: int,
    data: st.DataObject,
) -> None:
    torch.manual_seed(data.draw(st.integers(0, 1 << 30)))
    num_blocks = 7
    slots = data.draw(
        st.lists(
            st.integers(0, num_blocks * block_size - 1),
            unique=True,
            min_size=num_tokens,
            max_size=num_tokens,
        )
    )
    slots = [data.draw(st.sampled_from([slot, slot, -1])) for slot in slots]
    num_heads = num_keys * (group + 2)
    heads = (torch.randn(num_tokens, num_heads, head_dim) * 4).to(dtype)
    norms = HeadNorms(*torch.randn(2, head_dim).to(dtype)) if normed else None
    turns = rotation(num_tokens, head_dim // 2)
    where = torch.tensor(slots, dtype=torch.int64)
    cache_dtype = FP8 if fp8 else dtype
    ours, theirs = (
        cache_layer(num_blocks, block_size, num_keys, head_dim, cache_dtype) for _ in range(2)
    )
    expected = heads.clone()
    reference.rotate_store(expected, *turns, norms, EPSILON, theirs, where)
    before = heads.clone()
    rotate_store(heads, *turns, norms, EPSILON, ours, where)

    num_queries = num_keys * group
    assert_close(heads[:, :num_queries], expected[:, :num_queries])
    assert torch.equal(heads[:, num_queries:], before[:, num_queries:])
    found, wanted = numbers(ours), numbers(theirs)
    assert torch.equal(found.isnan(), wanted.isnan())
    written = (~found.isnan()).flatten(2).any(-1).sum()
    assert written == sum(slot >= 0 for slot in slots)
    tolerance = 0.13 if fp8 else None  # a step of e4m3, where both round to different sides
    if tolerance is None:
        assert_close(found.nan_to_num(0.0).to(dtype), wanted.nan_to_num(0.0).to(dtype))
    else:
        torch.testing.assert_close(found, wanted, equal_nan=True, rtol=tolerance, atol=1e-2)


def test_eight_bits_keep_a_head_to_a_sixteenth_of_its_largest() -> None:
    heads = torch.randn(4, 3, 64) * torch.tensor([1e-3, 1.0, 50.0, 1e4])[:, None, None]
    heads[0, 2] = 0.0
    layer = cache_layer(1, 4, 1, 64, FP8)
    still = torch.ones(4, 32), torch.zeros(4, 32)
    rotate_store(heads, *still, None, EPSILON, layer, torch.arange(4))
    pairs = heads[:, 1:].view(4, 2, 1, 64)
    stored = numbers(layer)[0]
    assert ((stored - pairs).abs() <= pairs.abs() / 16 + pairs.abs().amax(-1, True) * 2e-6).all()
    assert layer.scales is not None
    torch.testing.assert_close(layer.scales[0, 1:], pairs.abs().amax(-1)[1:] / FP8_MAX)


@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_a_head_that_is_not_finite_shows_in_its_scale_alone(odd: float) -> None:
    heads = torch.randn(2, 3, 64)
    heads[1, 1, 40] = odd
    still = torch.ones(2, 32), torch.zeros(2, 32)
    for store in (rotate_store, reference.rotate_store):
        layer = cache_layer(2, 2, 1, 64, FP8)
        layer.data.view(torch.uint8).zero_()
        store(heads.clone(), *still, None, EPSILON, layer, torch.arange(2))
        assert layer.scales is not None
        assert layer.scales[0].isnan().tolist() == [[[False], [False]], [[True], [False]]]
        assert layer.data.float().isfinite().all()
