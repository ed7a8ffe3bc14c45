"""Copies between the KV cache and host memory."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

import torch

from millrace.engine.kv.cache import (
    CacheCommand,
    CheckBlocks,
    CopyBlock,
    KVCache,
    LoadBlocks,
    OtherParts,
    ReserveSlots,
    ScrubBlocks,
    StoreBlocks,
    pieces_of,
)
from millrace.engine.kv.disk_cache import SlotMemory
from millrace.engine.kv.host_cache import HostMemory
from millrace.engine.threads.choice import leave_core
from millrace.engine.transfer.memory import (
    Blocks,
    SharedPages,
    copy_runs,
    private_pages,
    runs_of,
    shares_of,
)

# Number of blocks for which another thread pays.
_BLOCKS_PER_THREAD = 16


class SharedHostMemory(HostMemory, SlotMemory, Protocol):
    """Host memory for blocks that other threads may fill and read, and also other processes if it
    has ``pages``."""

    pages: SharedPages | None

    def slots(self) -> Blocks:
        """All slots: [num_layers, num_slots, bytes]."""


def host_memory_of(cache: KVCache, host_bytes: int, *, shared: bool = False) -> SharedHostMemory:
    """Allocate host memory for the blocks of a cache on any device.

    With ``shared``, other processes can map it. Raises ConfigError if memory for a device's copies
    cannot be locked.
    """
    if cache.others is not None:
        return PartedHostMemory(cache, cache.others, host_bytes)
    return _own_memory(cache, host_bytes, shared=shared)


def _own_memory(cache: KVCache, host_bytes: int, *, shared: bool) -> SharedHostMemory:
    if not cache.blocks.is_cuda:
        return PlainHostMemory(cache, host_bytes, shared=shared)
    # Imported here since it needs Triton, which exists only for Linux.
    from millrace.engine.kv.locked_host_memory import LockedHostMemory

    return LockedHostMemory(cache, host_bytes, shared=shared)


class PlainHostMemory:
    """Host memory for a cache on a CPU: one allocation in the cache's layout, made at the first
    write.

    ``store`` and ``load`` copy runs of neighbouring blocks at once, in all layers, in about 5 us a
    run beside the bytes.
    """

    bytes_per_s = None
    is_settled = True

    def __init__(self, cache: KVCache, host_bytes: int, *, shared: bool = False) -> None:
        num_layers, _, layer_bytes = cache.blocks.shape
        self.block_bytes = num_layers * layer_bytes
        self.num_slots = host_bytes // self.block_bytes
        self._cache = cache.blocks
        self._settle = cache.settle
        self._shape = (num_layers, self.num_slots, layer_bytes)
        self._slots: torch.Tensor | None = None
        self._making = threading.Lock()
        size_bytes = self.num_slots * self.block_bytes
        self.pages = SharedPages(size_bytes) if shared and size_bytes else None

    def store(self, blocks: list[int], slots: list[int]) -> None:
        """Copy blocks of the cache into slots. Raises RuntimeError if there is no memory."""
        self._settle()
        _copy_blocks(self._cache, blocks, self._memory(), slots)

    def load(self, slots: list[int], blocks: list[int]) -> None:
        """Copy slots into blocks of the cache."""
        assert self._slots is not None, "nothing was stored"
        self._settle()
        _copy_blocks(self._slots, slots, self._cache, blocks)

    def pieces(self, slot: int) -> list[memoryview]:
        """Return the bytes of a slot, one piece for each layer."""
        return pieces_of(self._memory(), slot)

    def slots(self) -> Blocks:
        """Return all slots."""
        return self._memory().numpy()

    def _memory(self) -> torch.Tensor:
        if self._slots is None:
            # Two threads that fill slots may get here at the same time.
            with self._making:
                if self._slots is None:
                    self._slots = self._allocate()
        return self._slots

    def _allocate(self) -> torch.Tensor:
        size_bytes = math.prod(self._shape)
        if not size_bytes:  # smaller than a block; a mapping has at least a byte
            return torch.empty(self._shape, dtype=torch.uint8)
        pages = private_pages(size_bytes) if self.pages is None else self.pages.pages
        return torch.frombuffer(pages, dtype=torch.uint8).view(self._shape)


class PartedHostMemory:
    """Host memory for a cache whose ranks have a part each, in memory of their own.

    Each rank has slots for its part, too, and rank 0 sends the commands. No process has a whole
    block, so blocks cannot be kept on a disk or lent to others.
    """

    pages: SharedPages | None = None

    def __init__(self, cache: KVCache, others: OtherParts, host_bytes: int) -> None:
        self.block_bytes = cache.block_bytes
        self.num_slots = host_bytes // self.block_bytes
        own_bytes = self.block_bytes - others.block_bytes
        self._own = _own_memory(cache, self.num_slots * own_bytes, shared=False)
        self._others = others
        if self.num_slots:
            others.tell(ReserveSlots(self.num_slots))

    @property
    def bytes_per_s(self) -> float | None:
        """Bandwidth of whole blocks, scaled from that of the parts in this rank."""
        own = self._own.bytes_per_s
        return None if own is None else own * self.block_bytes / self._own.block_bytes

    @property
    def is_settled(self) -> bool:
        return self._own.is_settled

    def store(self, blocks: list[int], slots: list[int]) -> None:
        """Copy blocks into slots in each rank. Raises RuntimeError if this rank has no memory."""
        self._others.tell(StoreBlocks(blocks, slots))
        self._own.store(blocks, slots)

    def load(self, slots: list[int], blocks: list[int]) -> None:
        """Copy slots into blocks in each rank."""
        self._others.tell(LoadBlocks(slots, blocks))
        self._own.load(slots, blocks)

    def pieces(self, slot: int) -> list[memoryview]:
        raise AssertionError(f"slot {slot} is in the memory of several ranks")

    def slots(self) -> Blocks:
        raise AssertionError("slots are in the memory of several ranks")


def _copy_blocks(
    source: torch.Tensor, sources: list[int], target: torch.Tensor, targets: list[int]
) -> None:
    runs = runs_of(sources, targets)
    # Plain threads, each with runs of its own. torch would split every copy over its threads, and
    # on a busy machine these wait for one another every 2 MiB.
    copy = partial(copy_runs, source.numpy(), target.numpy())
    num_threads = min(torch.get_num_threads(), len(sources) // _BLOCKS_PER_THREAD + 1)
    shares = shares_of(runs, len(sources), num_threads)
    if len(shares) == 1:
        copy(shares[0])
        return
    with ThreadPoolExecutor(len(shares), initializer=leave_core) as threads:
        for _ in threads.map(copy, shares):
            pass


class CachePart:
    """Executor of rank 0's commands for the blocks of ``cache`` and as many slots of host
    memory."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._memory: SharedHostMemory | None = None

    def obey(self, command: CacheCommand) -> list[bool] | None:
        """Run a command; return the answer to ``CheckBlocks``.

        Raises ConfigError for slots without memory.
        """
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
