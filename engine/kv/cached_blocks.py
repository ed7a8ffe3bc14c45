"""Blocks that are found again by their contents: on the device, in host memory and below it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from millrace.engine.kv.block_pool import BlockPool
from millrace.engine.kv.events import KvEvents
from millrace.engine.kv.host_cache import HostCache
from millrace.engine.kv.prefix_cache import PrefixCache
from millrace.engine.types import PrefixChanges


class FoundBlocks(NamedTuple):
    """The blocks of consecutive keys from the first on, None where only the host has a copy; how
    many are blocks, and how many of those are idle."""

    blocks: list[int | None]
    num_here: int
    num_idle: int


class CachedBlocks:
    """Finds blocks of a pool by their keys, moves them to host memory and back, and tells what
    changed. Allocates only to reload what the host has.

    Without ``shared`` nothing is told: only the sequence that made a block finds it.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size_tokens: int,
        *,
        shared: bool,
        host: HostCache | None,
        idle_offload_s: float = math.inf,
    ) -> None:
        self.host = host
        self._index = PrefixCache()
        self.pool = BlockPool(num_blocks, block_size_tokens, self._index.evict)
        self._idle_offload_s = idle_offload_s
        self._events = KvEvents(self._is_kept, self.kept_keys)
        self.num_swaps = 0
        if shared:
            self._index.on_change = self._events.record
            if host is not None:
                host.on_change = self._events.record

    @property
    def num_evicted_blocks(self) -> int:
        return self._index.num_evicted_blocks

    def pop_changes(self) -> PrefixChanges | None:
        """Return what changed since the last call."""
        return self._events.pop()

    def _is_kept(self, key: bytes) -> bool:
        return key in self._index or (
            self.host is not None and (key in self.host or key in self.host.below)
        )

    def kept_keys(self) -> Iterator[bytes]:
        """Yield the keys that are found here, in host memory or below it, the longest unused
        first."""
        if self.host is not None:
            here = (self._index, self.host)
            yield from (k for k in self.host.below if not any(k in one for one in here))
            yield from (key for key in self.host if key not in self._index)
        yield from map(self._index.key_of, self.pool.idle_blocks())
        yield from (key for key, block in self._index.items() if not self.pool.is_idle(block))

    def block_of(self, key: bytes) -> int | None:
        """Return the block on the device that has the contents of a key, if there is one."""
        return self._index.get(key)

    def find(self, keys: Iterable[bytes]) -> FoundBlocks:
        """Look for ``keys`` up to the first that is nowhere; changes nothing."""
        blocks: list[int | None] = []
        num_here = num_idle = 0
        for key in keys:
            block = self._index.get(key)
            if block is not None:
                num_here += 1
                num_idle += self.pool.is_idle(block)
            elif self.host is None or key not in self.host:
                break
            blocks.append(block)
        return FoundBlocks(blocks, num_here, num_idle)

    def take(self, keys: list[bytes], found: list[int | None]) -> list[int]:
        """Share the blocks that ``find`` returned just now for ``keys``, and copy what only the
        host has into new ones."""
        for block in found:
            if block is not None:
                self.pool.share(block)
        missing = [key for key, block in zip(keys, found, strict=True) if block is None]
        if not missing:
            return [block for block in found if block is not None]
        assert self.host is not None
        new = self.pool.allocate(len(missing))
        assert new is not None, "a hit was taken for which there are no blocks"
        self.host.load(missing, new)
        for key, block in zip(missing, new, strict=True):
            self.insert(key, block)
        fresh = iter(new)
        return [next(fresh) if block is None else block for block in found]

    def insert(self, key: bytes, block: int) -> None:
        """Have a full block found by its key, unless another one is."""
        if self._index.insert(key, block):
            self.pool.keep(block)

    def note_use(self, keys: Iterable[bytes]) -> None:
        """Tell of keys that a sequence gives back."""
        for key in keys:
            self._events.record(key)

    def swap_out(self, keys: list[bytes], blocks: list[int]) -> list[bytes]:
        """Copy blocks to host memory and pin them there; return the keys for which there was
        room."""
        assert self.host is not None
        num_stored = self.host.store(keys, blocks)
        self.host.pin(keys[:num_stored])
        self.num_swaps += num_stored > 0
        return keys[:num_stored]

    def offload_idle(self, now_s: float) -> None:
        """Move blocks that have been idle for long to host memory, a few at a time."""
        if self.host is None or self.host.num_slots == 0:
            return
        blocks = self.pool.idle_since(now_s - self._idle_offload_s, self.host.blocks_at_a_time)
        if not blocks:
            return
        num_stored = self.host.store([self._index.key_of(block) for block in blocks], blocks)
        for block in blocks[:num_stored]:
            self._index.remove(block)
            self.pool.drop_idle(block)

    def forget_idle(self) -> None:
        """Empty the prefix cache but for the blocks that are in use."""
        for block in list(self.pool.idle_blocks()):
            self.pool.drop_idle(block)
            key = self._index.key_of(block)
            self._index.remove(block)
            self._index.on_change(key)
        if self.host is not None:
            self.host.forget(list(self.host))

    def check_integrity(self, pinned_keys: Iterable[bytes]) -> None:
        """Raise AssertionError unless pool, index and host memory agree; ``pinned_keys`` are those
        that sequences wait for."""
        self.pool.check_integrity()
        self._index.check_integrity(self.pool.kept_blocks())
        if self.host is not None:
            self.host.check_integrity(pinned_keys)
