"""The part of a KV cache that a rank has which is not rank 0."""

from __future__ import annotations

from millrace.engine.kv.cache import KVCache
from millrace.engine.kv.cache_commands import (
    CacheCommand,
    CheckBlocks,
    CopyBlock,
    LoadBlocks,
    ReserveSlots,
    ScrubBlocks,
    StoreBlocks,
)
from millrace.engine.kv.host_memory import SharedHostMemory, host_memory_of


class CachePart:
    """Does what rank 0 says with the blocks of ``cache``, and with as many slots of the host's
    memory as rank 0 has."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._memory: SharedHostMemory | None = None

    def obey(self, command: CacheCommand) -> list[bool] | None:
        """Do it; the answer to ``CheckBlocks``. Raises ConfigError for slots that there is no
        memory for."""
        cache = self._cache
        match command:
            case CheckBlocks(blocks):
                return cache.finite_blocks(blocks)
            case CopyBlock(source, target):
                cache.copy_block(source, target)
            case ScrubBlocks(blocks):
                cache.scrub(blocks)
            case ReserveSlots(num_slots):
                self._memory = host_memory_of(cache, num_slots * cache.block_bytes)
            case StoreBlocks(blocks, slots):
                self._host.store(blocks, slots)
            case LoadBlocks(slots, blocks):
                self._host.load(slots, blocks)
        return None

    @property
    def _host(self) -> SharedHostMemory:
        assert self._memory is not None, "slots are reserved before they are used"
        return self._memory
