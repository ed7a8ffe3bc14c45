"""Who holds which block of the KV cache."""

from __future__ import annotations

from collections.abc import Iterable


class BlockPool:
    """Reference counts over ``num_blocks`` blocks of ``block_size_tokens`` tokens each.

    Block ids are 0 … num_blocks - 1. A block is free exactly when its count is 0. Whoever
    allocated or shared a block frees it once; allocation and freeing are O(1) per block. The last
    freed block is handed out first, since it is the one that caches still hold.
    """

    def __init__(self, num_blocks: int, block_size_tokens: int) -> None:
        if num_blocks < 1 or block_size_tokens < 1:
            raise ValueError(
                f"a pool needs blocks of at least one token, got {num_blocks} blocks of "
                f"{block_size_tokens} tokens"
            )
        self.num_blocks = num_blocks
        self.block_size_tokens = block_size_tokens
        self._free = list(range(num_blocks - 1, -1, -1))
        self._counts = [0] * num_blocks

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def capacity_tokens(self) -> int:
        return self.num_blocks * self.block_size_tokens

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size_tokens)

    def allocate(self, count: int) -> list[int] | None:
        """``count`` blocks with one reference each; None, and nothing taken, if they do not fit."""
        if count > len(self._free):
            return None
        if count == 0:
            return []
        taken = self._free[-count:]
        del self._free[-count:]
        for block in taken:
            self._counts[block] = 1
        return taken

    def share(self, block: int) -> None:
        """Add a reference to a block that somebody holds."""
        if self._counts[block] == 0:
            raise ValueError(f"block {block} is free and cannot be shared")
        self._counts[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Drop one reference of each block."""
        for block in blocks:
            count = self._counts[block]
            if count == 0:
                raise ValueError(f"block {block} is freed twice")
            self._counts[block] = count - 1
            if count == 1:
                self._free.append(block)

    def num_references(self, block: int) -> int:
        return self._counts[block]

    def check_integrity(self) -> None:
        """Raise AssertionError unless free list and counts say the same about every block."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is in the free list twice"
        for block, count in enumerate(self._counts):
            assert count >= 0, f"block {block} has {count} references"
            assert (count == 0) == (block in free), f"block {block} is neither free nor held"
