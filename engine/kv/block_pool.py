"""Reference counts of the KV cache's blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator


def _ignore(_block: int) -> None:
    """Ignore evictions: no cache keeps blocks."""


class BlockPool:
    """Block pool with LRU eviction: reference counts over ``num_blocks`` blocks of
    ``block_size_tokens`` tokens.

    Block ids are 0 … num_blocks - 1. A block is free exactly when its count is 0. Each allocation
    and each ``share`` is undone by one ``free``. Every operation is O(1) per block. A free block
    with contents to ``keep`` is idle: it may be shared again. Idle blocks are allocated only when
    no other free block is left, the longest idle first, after a call of ``on_evict``. Of the other
    free blocks, the last freed is allocated first, since it is most likely in the processor's
    caches.
    """

    def __init__(
        self, num_blocks: int, block_size_tokens: int, on_evict: Callable[[int], None] = _ignore
    ) -> None:
        if num_blocks < 1 or block_size_tokens < 1:
            raise ValueError(
                f"a pool needs blocks of at least one token, got {num_blocks} blocks of "
                f"{block_size_tokens} tokens"
            )
        self.num_blocks = num_blocks
        self.block_size_tokens = block_size_tokens
        self._free = list(range(num_blocks - 1, -1, -1))
        self._counts = [0] * num_blocks
        self._kept = [False] * num_blocks
        self._idle: OrderedDict[int, float] = OrderedDict()  # block: the time when it went idle
        self._newest_s = 0.0
        self._on_evict = on_evict

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks that can be allocated, idle ones included."""
        return len(self._free) + len(self._idle)

    @property
    def num_idle_blocks(self) -> int:
        return len(self._idle)

    @property
    def capacity_tokens(self) -> int:
        return self.num_blocks * self.block_size_tokens

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size_tokens)

    def allocate(self, count: int) -> list[int] | None:
        """Allocate ``count`` blocks with one reference each; None, and no change, if they do not
        fit."""
        if count > len(self._free) + len(self._idle):
            return None
        if count == 0:
            return []
        taken = self._free[-count:]
        del self._free[-count:]
        while len(taken) < count:
            block, _ = self._idle.popitem(last=False)
            self._kept[block] = False
            self._on_evict(block)
            taken.append(block)
        for block in taken:
            self._counts[block] = 1
        return taken

    def share(self, block: int) -> None:
        """Add a reference to a block that is in use or idle."""
        count = self._counts[block]
        if count == 0:
            if block not in self._idle:
                raise ValueError(f"block {block} is free and cannot be shared")
            del self._idle[block]
        self._counts[block] = count + 1

    def free(self, blocks: Iterable[int], now_s: float = 0.0) -> None:
        """Drop one reference of each block.

        Kept blocks without references go idle at ``now_s``, or at the time of the previous call if
        that was later.
        """
        self._newest_s = now_s = max(now_s, self._newest_s)
        for block in blocks:
            count = self._counts[block]
            if count == 0:
                raise ValueError(f"block {block} is freed twice")
            self._counts[block] = count - 1
            if count == 1:
                if self._kept[block]:
                    self._idle[block] = now_s
                else:
                    self._free.append(block)

    def keep(self, block: int) -> None:
        """Let a block in use go idle when its last reference is dropped."""
        if self._counts[block] == 0:
            raise ValueError(f"block {block} is free and cannot be kept")
        self._kept[block] = True

    def drop_idle(self, block: int) -> None:
        """Free an idle block without a call of ``on_evict``."""
        del self._idle[block]
        self._kept[block] = False
        self._free.append(block)

    def idle_since(self, until_s: float, limit: int) -> list[int]:
        """Return up to ``limit`` blocks that went idle at ``until_s`` or before, the longest idle
        first."""
        blocks: list[int] = []
        for block, since_s in self._idle.items():
            if since_s > until_s or len(blocks) == limit:
                break
            blocks.append(block)
        return blocks

    def is_idle(self, block: int) -> bool:
        return block in self._idle

    def idle_blocks(self) -> Iterator[int]:
        """Iterate over idle blocks, the longest idle first."""
        return iter(self._idle)

    def num_references(self, block: int) -> int:
        return self._counts[block]

    def kept_blocks(self) -> list[int]:
        return [block for block, kept in enumerate(self._kept) if kept]

    def check_integrity(self) -> None:
        """Raise AssertionError unless lists, flags and counts agree about every block."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is in the free list twice"
        assert free.isdisjoint(self._idle), "a block is both idle and in the free list"
        for block, count in enumerate(self._counts):
            assert count >= 0, f"block {block} has {count} references"
            assert (count == 0) == (block in free or block in self._idle), (
                f"block {block} is neither free nor held"
            )
            assert block not in self._idle or self._kept[block], f"block {block} is idle, not kept"
            assert block not in free or not self._kept[block], f"block {block} is kept but lost"
        times = list(self._idle.values())
        assert times == sorted(times), "idle blocks are out of order"
