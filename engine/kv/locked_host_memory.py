"""Page-locked host memory, which a device reads and writes itself, for blocks of its KV cache."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from millrace.engine.kernels.gpu.blocks import copy_blocks
from millrace.engine.kv.cache import KVCache, pieces_of
from millrace.engine.transfer.memory import Blocks, SharedPages, private_pages
from millrace.schemas.errors import ConfigError

# Copy bandwidth assumed before the first measurement, and weight of the latest measurement in the
# EWMA.
_ASSUMED_BYTES_PER_S = 20e9
_NEWEST_WEIGHT = 0.2


# These functions of torch have no type annotations.
_cuda_event: Callable[..., Any] = torch.cuda.Event
_cuda_runtime: Callable[[], Any] = torch.cuda.cudart


class Event(Protocol):
    """Position in the device's work, as ``torch.cuda.Event``."""

    def record(self) -> None:
        """Record the current position."""

    def query(self) -> bool:
        """Return whether the device has passed the position."""

    def elapsed_time(self, end: Any, /) -> float:
        """Return the milliseconds between two positions that the device has passed."""


class _Copy(NamedTuple):
    """Copy that the device may not have completed."""

    start: Event
    end: Event
    num_blocks: int


class LockedHostMemory:
    """Page-locked memory: one allocation in the layout of the cache, made and locked at once.

    Locking takes a fraction of a second per GiB, too long for a step. ``store`` and ``load`` only
    queue one kernel for all blocks on the current stream. Work that is queued there before the copy
    uses the blocks before it, and later work uses them after it. So blocks may be reassigned and
    slots read as soon as the call returns, as long as all users of the cache are on that stream.
    """

    def __init__(
        self,
        cache: KVCache,
        host_bytes: int,
        *,
        make_event: Callable[[], Event] | None = None,
        shared: bool = False,
    ) -> None:
        num_layers, _, layer_bytes = cache.blocks.shape
        self.block_bytes = num_layers * layer_bytes
        self.num_slots = host_bytes // self.block_bytes
        self._cache = cache.blocks
        self._make_event = make_event or _timing_event
        self._copies: deque[_Copy] = deque()
        self._bytes_per_s = _ASSUMED_BYTES_PER_S
        size_bytes = self.num_slots * self.block_bytes
        memory = torch.empty(0, dtype=torch.uint8)
        self.pages: SharedPages | None = None
        if size_bytes:
            memory = self._allocate(size_bytes, shared=shared)
        self._slots = memory.view(num_layers, self.num_slots, layer_bytes)

    def _allocate(self, size_bytes: int, *, shared: bool) -> torch.Tensor:
        """Allocate locked memory. If shared memory cannot be locked, allocate private memory."""
        self.pages = SharedPages(size_bytes) if shared else None
        # Exact pages, since torch would lock memory up to the next power of two.
        pages = private_pages(size_bytes) if self.pages is None else self.pages.pages
        memory = torch.frombuffer(pages, dtype=torch.uint8)
        if not self._cache.is_cuda:
            return memory
        try:
            _lock(memory)
        except ConfigError:
            if not shared:
                raise
            return self._allocate(size_bytes, shared=False)
        weakref.finalize(self, _unlock, memory.data_ptr()).atexit = False
        return memory

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth of the copies that the device has completed, as an EWMA."""
        while self._copies and self._copies[0].end.query():
            start, end, num_blocks = self._copies.popleft()
            copy_ms = start.elapsed_time(end)
            if copy_ms > 0:
                measured = num_blocks * self.block_bytes / (copy_ms / 1e3)
                self._bytes_per_s += _NEWEST_WEIGHT * (measured - self._bytes_per_s)
        return self._bytes_per_s

    @property
    def is_settled(self) -> bool:
        """True if the device has completed all copies."""
        return all(copy.end.query() for copy in self._copies)

    def pieces(self, slot: int) -> list[memoryview]:
        """Return the bytes of a slot, one piece for each layer."""
        return pieces_of(self._slots, slot)

    def slots(self) -> Blocks:
        """Return all slots."""
        return self._slots.numpy()

    def store(self, blocks: list[int], slots: list[int]) -> None:
        """Queue a copy of blocks of the cache into slots."""
        self._copy(self._cache, blocks, self._slots, slots)

    def load(self, slots: list[int], blocks: list[int]) -> None:
        """Queue a copy of slots into blocks of the cache."""
        self._copy(self._slots, slots, self._cache, blocks)

    def _copy(
        self, source: torch.Tensor, sources: list[int], target: torch.Tensor, targets: list[int]
    ) -> None:
        # New pinned memory for each copy. torch does not reuse it before the device has read it.
        ids = torch.tensor((sources, targets), dtype=torch.int64, pin_memory=self._cache.is_cuda)
        source_ids, target_ids = ids.to(self._cache.device, non_blocking=True)
        start, end = self._make_event(), self._make_event()
        start.record()
        copy_blocks(source, target, source_ids, target_ids)
        end.record()
        self._copies.append(_Copy(start, end, len(sources)))


def _timing_event() -> Event:
    event: Event = _cuda_event(enable_timing=True)
    return event


def _lock(memory: torch.Tensor) -> None:
    """Lock memory for use by the device. Raises ConfigError if that fails."""
    error = _cuda_runtime().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(error) != 0:
        raise ConfigError(
            f"{memory.numel()} bytes of host memory for the KV cache cannot be locked "
            f"({error}). Lower engine.host_cache_bytes."
        )


def _unlock(address: int) -> None:
    """Unlock memory, once no copy uses it."""
    torch.cuda.synchronize()
    _cuda_runtime().cudaHostUnregister(address)
