"""Copies between the KV cache and memory of the host."""

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

# A thread more is worth starting for so many blocks.
_BLOCKS_PER_THREAD = 16


class SharedHostMemory(HostMemory, SlotMemory, Protocol):
    """Memory for blocks that other threads may fill and read as well, and other processes if there
    are ``pages`` behind it."""

    pages: SharedPages | None

    def slots(self) -> Blocks:
        """All of it: [num_layers, num_slots, bytes]."""


def host_memory_of(cache: KVCache, host_bytes: int, *, shared: bool = False) -> SharedHostMemory:
    """Memory for blocks of a cache, wherever that lies; ``shared``: for other processes, too.
    Raises ConfigError if a device's cannot be had."""
    if cache.others is not None:
        return PartedHostMemory(cache, cache.others, host_bytes)
    return _own_memory(cache, host_bytes, shared=shared)


def _own_memory(cache: KVCache, host_bytes: int, *, shared: bool) -> SharedHostMemory:
    if not cache.blocks.is_cuda:
        return PlainHostMemory(cache, host_bytes, shared=shared)
    # Needs Triton, which there is for Linux only.
    from millrace.engine.kv.locked_host_memory import LockedHostMemory

    return LockedHostMemory(cache, host_bytes, shared=shared)


class PlainHostMemory:
    """For a cache in the host's memory, too: one allocation in its layout, made when it is first
    written to.

    ``store`` and ``load`` copy runs of neighbouring blocks at once, in all layers: about 5 us a
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
        """The bytes of a slot, a piece for each layer."""
        return pieces_of(self._memory(), slot)

    def slots(self) -> Blocks:
        """All of it."""
        return self._memory().numpy()

    def _memory(self) -> torch.Tensor:
        if self._slots is None:
            # Threads that fill slots may be the first, and two of them at once.
            with self._making:
                if self._slots is None:
                    self._slots = self._made()
        return self._slots

    def _made(self) -> torch.Tensor:
        size_bytes = math.prod(self._shape)
        if not size_bytes:  # smaller than a block; a mapping has at least a byte
            return torch.empty(self._shape, dtype=torch.uint8)
        pages = private_pages(size_bytes) if self.pages is None else self.pages.pages
        return torch.frombuffer(pages, dtype=torch.uint8).view(self._shape)


class PartedHostMemory:
    """For a cache of which ranks have a part each, in memory of their own: each has slots for its
    part, too, and rank 0 says what goes where. So nobody sees the whole of a block, and none can be
    kept on a disk or lent to others.
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
        """Of the blocks' parts that are here, at as much as all parts come together."""
        own = self._own.bytes_per_s
        return None if own is None else own * self.block_bytes / self._own.block_bytes

    @property
    def is_settled(self) -> bool:
        return self._own.is_settled

    def store(self, blocks: list[int], slots: list[int]) -> None:
        """Have blocks copied into slots by each rank. Raises RuntimeError if there is no memory
        here."""
        self._others.tell(StoreBlocks(blocks, slots))
        self._own.store(blocks, slots)

    def load(self, slots: list[int], blocks: list[int]) -> None:
        """Have slots copied into blocks by each rank."""
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
    # Plain threads, each with runs of its own: torch would split every copy over its threads, and
    # with anything else on the machine these wait for one another 2 MiB at a time.
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
