"""Finding blocks of the KV cache again by what is in them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Rows
from hashlib import blake2b

# 128 bits: two different prefixes of a fleet's lifetime meet with a chance below 1e-15.
_KEY_BYTES = 16


def root_key(salt: str) -> bytes:
    """The key of the empty prefix. Prefixes under different salts never meet."""
    return blake2b(salt.encode(), digest_size=_KEY_BYTES).digest()


def extend_keys(
    keys: list[bytes], root: bytes, token_ids: Rows[int], *, num_blocks: int, block_size_tokens: int
) -> None:
    """Append the keys of the blocks up to ``num_blocks``.

    A block's key is the hash of its tokens and of the key before it, so it stands for all tokens
    from the first on; 0.7 us a block.
    """
    first = len(keys)
    raw = array(
        "I", token_ids[first * block_size_tokens : num_blocks * block_size_tokens]
    ).tobytes()
    size = 4 * block_size_tokens
    key = keys[-1] if keys else root
    for start in range(0, (num_blocks - first) * size, size):
        key = blake2b(key + raw[start : start + size], digest_size=_KEY_BYTES).digest()
        keys.append(key)


class PrefixCache:
    """Which block holds the tokens that a key stands for.

    One block a key and one key a block. It holds no references: the pool says ``forget`` before
    it hands out a block whose contents were kept.
    """

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self.num_evicted_blocks = 0

    def __len__(self) -> int:
        return len(self._block_of)

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
        return True

    def forget(self, block: int) -> None:
        """The block's contents are about to be overwritten."""
        self.remove(block)
        self.num_evicted_blocks += 1

    def remove(self, block: int) -> None:
        del self._block_of[self._key_of.pop(block)]

    def check_integrity(self, kept_blocks: list[int]) -> None:
        """Raise AssertionError unless keys and blocks match, and are those that the pool keeps."""
        assert len(self._block_of) == len(self._key_of), "keys and blocks do not pair"
        for block, key in self._key_of.items():
            assert self._block_of.get(key) == block, f"block {block} is not found by its key"
        assert sorted(self._key_of) == kept_blocks, "pool and prefix cache keep different blocks"
