"""The KV cache's memory in each dtype, and copies of its blocks to and from the host."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.engine.kernels.gpu.reference.operations import rotate_store
from millrace.engine.kv.cache import INT8_GROUP, KVCache, block_bytes, cache_dtype
from millrace.engine.kv.host_memory import PlainHostMemory, host_memory_of
from millrace.engine.kv.locked_host_memory import LockedHostMemory
from millrace.registry.checkpoints.checkpoint import ModelConfig

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])


def model(num_kv_heads: int = 2, head_dim: int = 16, num_layers: int = 3) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        hidden_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=num_kv_heads * 2,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=32,
        vocab_size=32,
        max_position_embeddings=512,
    )


def kv_cache(dtype: torch.dtype, *, num_blocks: int = 7, block_size: int = 4) -> KVCache:
    return KVCache(
        model(), num_blocks=num_blocks, block_size_tokens=block_size, dtype=dtype, device=CPU
    )


def filled(dtype: torch.dtype, *, num_blocks: int = 7) -> KVCache:
    """Return a cache full of random numbers."""
    cache = kv_cache(dtype, num_blocks=num_blocks)
    cache.data.copy_(torch.randn(cache.data.shape))
    if cache.scales is not None:
        cache.scales.uniform_(0.1, 1.0)
    return cache


@settings(deadline=None)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, FP8, torch.int8]),
    block_size=st.integers(1, 17),
    num_kv_heads=st.integers(1, 5),
    head_dim=st.sampled_from([8, 64, 80, 128]),
    num_blocks=st.integers(1, 3),
)
def test_blocks_are_in_one_piece_each_as_large_as_said(
    dtype: torch.dtype, block_size: int, num_kv_heads: int, head_dim: int, num_blocks: int
) -> None:
    config = model(num_kv_heads, head_dim)
    cache = KVCache(
        config, num_blocks=num_blocks, block_size_tokens=block_size, dtype=dtype, device=CPU
    )
    assert not cache.blocks.any()
    size_bytes = block_bytes(config, block_size, dtype)
    assert cache.blocks.numel() == size_bytes * (num_blocks + 1)
    values = 2 * block_size * num_kv_heads * config.num_hidden_layers
    num_groups = -(-head_dim // INT8_GROUP)
    scale_bytes = {FP8: 4, torch.int8: 2 * num_groups}.get(dtype, 0)
    least = values * (head_dim * dtype.itemsize + scale_bytes)
    assert least <= size_bytes <= least + 30 * config.num_hidden_layers
    if scale_bytes:
        assert size_bytes % (16 * config.num_hidden_layers) == 0
    data, scales = cache.layer(1)
    assert data.shape == (num_blocks + 1, block_size, 2, num_kv_heads, head_dim)
    cache.blocks[1, num_blocks] = 255
    written = [data]
    if scales is not None:
        groups = (num_groups,) if dtype is torch.int8 else ()
        assert scales.shape == (*data.shape[:-1], *groups)
        written.append(scales)
    for tensor in written:
        raw = tensor.view(torch.uint8)
        assert (raw[num_blocks] == 255).all()
        raw[num_blocks] = 0
        assert not raw.any()
    # The other bytes are room between and behind the two.
    assert (cache.blocks == 255).sum() * config.num_hidden_layers == size_bytes - least


def test_eight_bits_take_little_more_than_half_the_memory() -> None:
    config = model(8, 128)
    assert block_bytes(config, 16, FP8) / block_bytes(config, 16, torch.bfloat16) < 0.52


def test_the_dtype_is_that_of_the_weights_or_fp8() -> None:
    assert cache_dtype(None, torch.bfloat16) is torch.bfloat16
    assert cache_dtype("fp8", torch.bfloat16) is FP8


@DTYPES
def test_a_copy_of_a_block_is_of_all_layers_and_scales(dtype: torch.dtype) -> None:
    cache = filled(dtype)
    before = cache.blocks.clone()
    cache.copy_block(2, 5)
    assert torch.equal(cache.blocks, before[:, [0, 1, 2, 3, 4, 2, 6, 7]])


@DTYPES
def test_what_is_not_finite_is_found_and_scrubbed(dtype: torch.dtype) -> None:
    cache = kv_cache(dtype)
    heads = torch.randn(8, 8, 16)
    heads[6, 5, 3] = torch.nan  # a key of block 3
    still = torch.ones(8, 8), torch.zeros(8, 8)
    slots = torch.tensor([4, 5, 6, 7, 12, 13, 14, -1])
    for layer in range(3):
        rotate_store(heads.clone(), *still, None, 1e-6, cache.layer(layer), slots)
    assert cache.finite_blocks([0, 3, 1]) == [True, False, True]
    kept = cache.blocks[:, 1].clone()
    cache.scrub([1, 3])
    assert cache.finite_blocks([3, 1]) == [True, True]
    assert not cache.blocks[:, 3].any()
    assert torch.equal(cache.blocks[:, 1], kept)


class Timeline:
    """Events of a device that passes them on command, with 2 ms between any two."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.num_passed = 0

    def event(self) -> Place:
        return Place(self)


class Place:
    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self.number = 0

    def record(self) -> None:
        self._timeline.num_recorded += 1
        self.number = self._timeline.num_recorded

    def query(self) -> bool:
        return self.number <= self._timeline.num_passed

    def elapsed_time(self, end: Place, /) -> float:
        return 2.0 * (end.number - self.number)


@DTYPES
@pytest.mark.parametrize("locked", [False, True])
def test_blocks_come_back_as_they_were(dtype: torch.dtype, locked: bool) -> None:
    rng = random.Random(7)
    cache = filled(dtype, num_blocks=9)
    size_bytes = block_bytes(model(), 4, dtype)
    memory: PlainHostMemory | LockedHostMemory
    if locked:
        memory = LockedHostMemory(cache, 6 * size_bytes + 1, make_event=Timeline().event)
    else:
        memory = PlainHostMemory(cache, 6 * size_bytes + 1)
    assert (memory.num_slots, memory.block_bytes) == (6, size_bytes)
    before = cache.blocks.clone()
    for count in (6, 1, 3):
        blocks, slots = rng.sample(range(9), count), rng.sample(range(6), count)
        memory.store(blocks, slots)
        cache.blocks[:, blocks] = 0xFF
        memory.load(slots, blocks)
        assert torch.equal(cache.blocks, before)


def test_copies_are_timed_when_the_device_has_done_them() -> None:
    cache = filled(torch.float32)
    timeline = Timeline()
    memory = LockedHostMemory(
        cache, 7 * block_bytes(model(), 4, torch.float32), make_event=timeline.event
    )
    assumed = memory.bytes_per_s
    memory.store([0, 1], [0, 1])
    memory.load([1], [3])
    assert memory.bytes_per_s == assumed
    timeline.num_passed = 2
    first = assumed + 0.2 * (2 * memory.block_bytes / 2e-3 - assumed)
    assert memory.bytes_per_s == pytest.approx(first)
    timeline.num_passed = 4
    second = first + 0.2 * (memory.block_bytes / 2e-3 - first)
    assert memory.bytes_per_s == memory.bytes_per_s == pytest.approx(second)


def test_memory_of_the_host_suits_the_cache() -> None:
    cache = kv_cache(torch.bfloat16)
    assert isinstance(host_memory_of(cache, 1 << 20), PlainHostMemory)
    assert LockedHostMemory(cache, 0, make_event=Timeline().event).num_slots == 0


@DTYPES
def test_what_is_done_to_a_block_is_done_to_all_parts(dtype: torch.dtype) -> None:
    cache = KVCache(
        model(), num_blocks=7, block_size_tokens=4, dtype=dtype, device=CPU, part_layers=(3, 3, 3)
    )
    parts = [cache.part(index) for index in range(3)]
    assert all(len(part.blocks) == model().num_hidden_layers for part in parts)
    for index, part in enumerate(parts):
        part.blocks[:, 2] = index + 1
    cache.copy_block(2, 5)
    for index, part in enumerate(parts):
        assert (part.blocks[:, 5] == index + 1).all()
    assert (cache.blocks[:, 1] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_number_that_is_none_is_found_in_any_part(dtype: torch.dtype, part: int) -> None:
    cache = KVCache(
        model(), num_blocks=7, block_size_tokens=4, dtype=dtype, device=CPU, part_layers=(3, 3, 3)
    )
    own = cache.part(part)
    last = (own.data if own.scales is None else own.scales)[-1]
    last[3] = torch.nan
    assert cache.finite_blocks([2, 3, 4]) == [True, False, True]
    cache.scrub([2, 3])
    assert cache.finite_blocks([3]) == [True]
    assert (cache.blocks[:, 3] == 0).all()
