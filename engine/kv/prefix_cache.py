"""Prefix cache: finds blocks by their contents, on the device, in host memory and below it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from millrace.engine.kv.block_pool import BlockPool
from millrace.engine.kv.host_cache import HostCache
from millrace.engine.types import PrefixChanges
from millrace.schemas.prefix import REPORTED_BYTES

MAX_NOTED_KEYS = 1 << 16


def _ignore(_key: bytes) -> None:
    """Ignore a change: there is no listener."""


class PrefixCache:
    """Index of blocks by key. A key identifies all tokens up to the end of its block.

    Each key has one block and each block one key. The index holds no references: the pool calls
    ``evict`` before it allocates a block whose contents were kept. ``on_change`` is called with
    each key that is inserted or evicted.
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
        """Iterate over keys and their blocks."""
        return iter(self._block_of.items())

    def get(self, key: bytes) -> int | None:
        return self._block_of.get(key)

    def key_of(self, block: int) -> bytes:
        """Return the key of a block that is in the cache."""
        return self._key_of[block]

    def insert(self, key: bytes, block: int) -> bool:
        """Insert a full block; return False if another block with the same tokens is known
        already."""
        if self._block_of.setdefault(key, block) != block:
            return False
        self._key_of[block] = key
        self.on_change(key)
        return True

    def evict(self, block: int) -> None:
        """Remove a block whose contents are about to be overwritten."""
        key = self.key_of(block)
        self.remove(block)
        self.num_evicted_blocks += 1
        self.on_change(key)

    def remove(self, block: int) -> None:
        """Remove a block whose contents are kept elsewhere."""
        del self._block_of[self._key_of.pop(block)]

    def check_integrity(self, kept_blocks: list[int]) -> None:
        """Raise AssertionError unless keys and blocks match, and equal the blocks that the pool
        keeps."""
        assert len(self._block_of) == len(self._key_of), "keys and blocks do not pair"
        for block, key in self._key_of.items():
            assert self._block_of.get(key) == block, f"block {block} is not found by its key"
        assert sorted(self._key_of) == kept_blocks, "pool and prefix cache keep different blocks"


class KvEvents:
    """KV events: keys that changed since the last ``pop``. O(1) per key.

    ``is_kept`` returns whether a key is found now; ``kept`` lists such keys, the longest unused
    first. If more than ``max_noted`` keys change, ``pop`` returns the whole contents.
    """

    def __init__(
        self,
        is_kept: Callable[[bytes], bool],
        kept: Callable[[], Iterable[bytes]],
        *,
        max_noted: int = MAX_NOTED_KEYS,
    ) -> None:
        self._is_kept = is_kept
        self._kept = kept
        self._max_noted = max_noted
        self._noted: dict[bytes, None] = {}
        self._overflowed = False

    def record(self, key: bytes) -> None:
        """Record that a key was inserted, evicted or used."""
        noted = self._noted
        noted.pop(key, None)
        noted[key] = None
        if len(noted) > self._max_noted:
            noted.clear()
            self._overflowed = True

    def pop(self) -> PrefixChanges | None:
        """Return the changes since the last call; None if there are none."""
        if self._overflowed:
            self._overflowed = False
            self._noted.clear()
            keys = list(self._kept())[-self._max_noted :]
            return PrefixChanges(added=_reported(keys), whole=True)
        if not self._noted:
            return None
        noted, self._noted = self._noted, {}
        is_kept = self._is_kept
        added = [key for key in noted if is_kept(key)]
        removed = [key for key in noted if not is_kept(key)] if len(added) < len(noted) else []
        return PrefixChanges(added=_reported(added), removed=_reported(removed))


def _reported(keys: list[bytes]) -> bytes:
    return b"".join([key[:REPORTED_BYTES] for key in keys])


class FoundBlocks(NamedTuple):
    """Blocks of consecutive keys from the first on.

    Attributes:
        blocks: None for a block that only host memory has.
        num_here: Number of blocks that are not None.
        num_idle: Number of these that are idle.
    """

    blocks: list[int | None]
    num_here: int
    num_idle: int


class CachedBlocks:
    """Cached blocks of a pool: finds them by key, moves them to host memory and back, and reports
    changes.

    It allocates blocks only to reload them from host memory. Without ``shared`` it reports no
    changes, since only the sequence that computed a block finds it.
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
        """Return the changes since the last call."""
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
        """Return the block on the device with the contents of a key; None if there is none."""
        return self._index.get(key)

    def find(self, keys: Iterable[bytes]) -> FoundBlocks:
        """Look up ``keys`` up to the first that is neither here nor in host memory; change
        nothing."""
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
        """Share the blocks that ``find`` has just returned for ``keys``, and copy blocks that
        only host memory has into new ones."""
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
        """Let a full block be found by its key, unless another block is."""
        if self._index.insert(key, block):
            self.pool.keep(block)

    def note_use(self, keys: Iterable[bytes]) -> None:
        """Report keys that a sequence gives back."""
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
        """Empty the prefix cache, except for blocks in use."""
        for block in list(self.pool.idle_blocks()):
            self.pool.drop_idle(block)
            key = self._index.key_of(block)
            self._index.remove(block)
            self._index.on_change(key)
        if self.host is not None:
            self.host.forget(list(self.host))

    def check_integrity(self, pinned_keys: Iterable[bytes]) -> None:
        """Raise AssertionError unless pool, index and host memory agree.

        ``pinned_keys`` are the keys that waiting sequences have pinned.
        """
        self.pool.check_integrity()
        self._index.check_integrity(self.pool.kept_blocks())
        if self.host is not None:
            self.host.check_integrity(pinned_keys)
