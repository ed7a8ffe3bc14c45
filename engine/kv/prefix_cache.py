"""Finds blocks of the KV cache by their contents."""

from __future__ import annotations

from collections.abc import Callable, Iterator


def _ignore(_key: bytes) -> None:
    """Nobody listens to changes."""


class PrefixCache:
    """Which block holds the tokens that a key stands for.

    One block a key and one key a block. It holds no references: the pool calls ``evict`` before
    it allocates a block whose contents were kept. ``on_change`` is called with each key that is
    inserted or evicted.
    """

    def __init__(self, on_change: Callable[[bytes], None] = _ignore) -> None:
        self.on_change = on_change
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self.num_evicted_blocks = 0

    def __len__(self) -> int:
        return len(self._block_of)

    def __contains__(self, key: bytes) -> bool:
        return key in self._block_of

    def items(self) -> Iterator[tuple[bytes, int]]:
        """Keys and their blocks."""
        return iter(self._block_of.items())

    def get(self, key: bytes) -> int | None:
        return self._block_of.get(key)

    def key_of(self, block: int) -> bytes:
        """The key of a block that is in the cache."""
        return self._key_of[block]

    def insert(self, key: bytes, block: int) -> bool:
        """Remember a full block; false if another one with the same tokens is known already."""
        if self._block_of.setdefault(key, block) != block:
            return False
        self._key_of[block] = key
        self.on_change(key)
        return True

    def evict(self, block: int) -> None:
        """The block's contents are about to be overwritten."""
        key = self.key_of(block)
        self.remove(block)
        self.num_evicted_blocks += 1
        self.on_change(key)

    def remove(self, block: int) -> None:
        """The block's contents are kept elsewhere."""
        del self._block_of[self._key_of.pop(block)]

    def check_integrity(self, kept_blocks: list[int]) -> None:
        """Raise AssertionError unless keys and blocks match, and are those that the pool keeps."""
        assert len(self._block_of) == len(self._key_of), "keys and blocks do not pair"
        for block, key in self._key_of.items():
            assert self._block_of.get(key) == block, f"block {block} is not found by its key"
        assert sorted(self._key_of) == kept_blocks, "pool and prefix cache keep different blocks"
