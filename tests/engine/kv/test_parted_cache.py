"""KV cache with a part at each rank: an operation on a block applies to all parts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.engine.kv.cache import CacheCommand, CheckBlocks, KVCache
from millrace.engine.kv.host_memory import CachePart, host_memory_of
from millrace.schemas.errors import ConfigError
from tests.engine.kv.test_kv_cache import filled
from tests.engine.support import resolved

NUM_BLOCKS = 7


class Others:
    """Two other ranks, which obey at once."""

    def __init__(self, caches: list[KVCache]) -> None:
        self.block_bytes = sum(cache.block_bytes for cache in caches)
        self._parts = [CachePart(cache) for cache in caches]

    def tell(self, command: CacheCommand) -> None:
        for part in self._parts:
            assert part.obey(command) is None

    def ask(self, command: CheckBlocks) -> list[bool]:
        answers = [part.obey(command) for part in self._parts]
        return [all(flags) for flags in zip(*filter(None, answers), strict=True)]


def parted() -> tuple[KVCache, list[KVCache]]:
    """Return rank 0's cache, and the caches of all ranks."""
    caches = [filled(torch.bfloat16, num_blocks=NUM_BLOCKS) for _ in range(3)]
    caches[0].others = Others(caches[1:])
    return caches[0], caches


@settings(deadline=None)
@given(source=st.integers(0, NUM_BLOCKS - 1), target=st.integers(0, NUM_BLOCKS - 1))
def test_a_block_is_copied_in_all_parts(source: int, target: int) -> None:
    lead, caches = parted()
    before = [cache.blocks.clone() for cache in caches]
    lead.copy_block(source, target)
    for cache, old in zip(caches, before, strict=True):
        old[:, target] = old[:, source]
        assert torch.equal(cache.blocks, old)


@pytest.mark.parametrize("rank", range(3))
def test_a_block_is_finite_if_all_parts_are(rank: int) -> None:
    lead, caches = parted()
    caches[rank].data[:, 4, 0, 0, 0, 0] = torch.nan
    assert lead.finite_blocks([2, 4, 6]) == [True, False, True]
    lead.scrub([2, 4])
    assert lead.finite_blocks([2, 4, 6]) == [True, True, True]
    assert not caches[rank].data[:, 4].any()
    assert caches[rank].data[:, 2].any()


@settings(deadline=None)
@given(blocks=st.permutations(range(NUM_BLOCKS)))
def test_slots_come_back_in_all_parts(blocks: list[int]) -> None:
    lead, caches = parted()
    # Slots for three blocks, and too little for a fourth.
    memory = host_memory_of(lead, 4 * lead.block_bytes - 1)
    assert memory.num_slots == 3
    assert memory.pages is None, "no part has the whole of a block"
    before = [cache.blocks.clone() for cache in caches]
    memory.store(blocks[:3], [2, 0, 1])
    for cache in caches:
        cache.blocks[:, blocks[:3]] = 0
    memory.load([2, 0, 1], blocks[3:6])
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache.blocks[:, blocks[3:6]], old[:, blocks[:3]])
        assert not cache.blocks[:, blocks[:3]].any()
    assert memory.is_settled


def test_no_slots_are_reserved_where_none_fit() -> None:
    lead, _ = parted()
    assert host_memory_of(lead, lead.block_bytes - 1).num_slots == 0


def test_whole_blocks_cannot_be_kept_on_disk() -> None:
    with pytest.raises(ConfigError, match="disk_cache_path keeps whole blocks"):
        resolved(kernels="reference", tensor_parallel=2, disk_cache_path="./kv")
    resolved(kernels="reference", tensor_parallel=2)
    resolved(device="cpu", tensor_parallel=2, disk_cache_path="./kv")
