"""Block tables of sequences: reserved, allocated, shared and released."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple

from millrace.engine.kv.cache import KVCache
from millrace.engine.kv.host_cache import HostCache
from millrace.engine.kv.prefix_cache import CachedBlocks
from millrace.engine.step.sequence import Sequence
from millrace.schemas.prefix import extend_keys, root_key


@dataclass(slots=True)
class TierHits:
    """Tokens that admitted sequences found, by the tier of their blocks: another worker's engine,
    the disk or an object store, for which a sequence waited, or host memory.

    Other hits were on the device.
    """

    block_size_tokens: int
    num_host_tokens: int = 0
    num_disk_tokens: int = 0
    num_object_tokens: int = 0
    num_peer_tokens: int = 0

    def note(
        self, sequence: Sequence, keys: SequenceOf[bytes], blocks: SequenceOf[int | None]
    ) -> None:
        """Count the blocks that a sequence found by these keys.

        None is a block that is not on the device.
        """
        is_newcomer = not sequence.started  # a preempted sequence finds its own blocks
        pulled = sequence.pulled_keys if is_newcomer else frozenset()
        read = sequence.disk_keys if is_newcomer else frozenset()
        stored = sequence.object_keys if is_newcomer else frozenset()
        for key, block in zip(keys, blocks, strict=True):
            if key in pulled:
                self.num_peer_tokens += self.block_size_tokens
            elif key in read:
                self.num_disk_tokens += self.block_size_tokens
            elif key in stored:
                self.num_object_tokens += self.block_size_tokens
            elif block is None:
                self.num_host_tokens += self.block_size_tokens


class PrefixHit(NamedTuple):
    """Cached prefix of a sequence.

    Attributes:
        blocks: Blocks of the cache; None for a block that only host memory has.
        num_here: Number of blocks that are not None.
        num_idle: Number of these that are idle.
        awaited: True while the next block is being computed for another sequence.
    """

    blocks: list[int | None]
    num_here: int
    num_idle: int
    awaited: bool


class BlockTables:
    """Block tables of sequences: allocates, shares and frees blocks.

    The blocks are those of the pool of ``cached``, which finds them by their contents. A block of a
    sequence's table is *cached* once it is full, computed and known to be finite. Cached blocks are
    never written again. If tables are ``shared``, other sequences find them by their tokens;
    otherwise only the sequence itself does, after a preemption. Only the last block of a table is
    ever written; while choices of one request share it, the first writer copies it (copy-on-write).

    ``num_reserved_blocks`` are reserved at admission for blocks that sequences still need;
    ``num_guaranteed_blocks`` of them are never allocated to other sequences. ``lent_blocks``
    returns the blocks that peers hold references to. ``on_release`` is called with the keys that a
    sequence gives back and the time.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size_tokens: int,
        memory: KVCache,
        *,
        shared: bool = True,
        host: HostCache | None = None,
        idle_offload_s: float = math.inf,
    ) -> None:
        self.cached = CachedBlocks(
            num_blocks, block_size_tokens, shared=shared, host=host, idle_offload_s=idle_offload_s
        )
        self.pool = self.cached.pool
        self.host = host
        self._memory = memory
        self._shared = shared
        self._size = block_size_tokens
        self._computing: dict[bytes, Sequence] = {}
        self.num_reserved_blocks = 0
        self.num_guaranteed_blocks = 0
        self.num_query_tokens = 0
        self.num_hit_tokens = 0
        self.tier_hits = TierHits(self._size)
        self.lent_blocks: Callable[[], Iterable[int]] = tuple
        self.on_release: Callable[[list[bytes], float], None] = lambda _keys, _now_s: None

    def match(self, sequence: Sequence) -> PrefixHit:
        """Find the longest cached prefix that leaves at least one token to compute; change
        nothing."""
        keys = self.keys_to_find(sequence)
        found = self.cached.find(keys)
        num_found = len(found.blocks)
        # An owner of lower rank may not proceed while this sequence is in the queue.
        owner = self._computing.get(keys[num_found]) if num_found < len(keys) else None
        return PrefixHit(*found, awaited=owner is not None and owner.rank < sequence.rank)

    def _looks_for_hits(self, sequence: Sequence) -> bool:
        return sequence.takes_prefix_hits and (self._shared or sequence.num_preemptions > 0)

    def keys_to_find(self, sequence: Sequence) -> list[bytes]:
        """Return the keys of the blocks that it may begin with; only its own ones if tables are not
        shared."""
        if not self._looks_for_hits(sequence):
            return []
        num_blocks = (sequence.num_tokens - 1) // self._size
        self._extend_keys(sequence, num_blocks)
        return sequence.block_keys[:num_blocks]

    def attach_prefix(self, sequence: Sequence, hit: PrefixHit) -> None:
        """Begin a table with the hit that ``match`` has just returned."""
        assert not sequence.block_table
        keys = self.keys_to_find(sequence)
        num_hit = len(hit.blocks)
        sequence.block_table = self.cached.take(keys[:num_hit], hit.blocks)
        sequence.num_cached_blocks = num_hit
        sequence.num_computed_tokens = num_hit * self._size
        self.unpin(sequence)
        if not sequence.started:
            sequence.num_cached_tokens = sequence.num_computed_tokens
            num_pulled = sum(key in sequence.pulled_keys for key in keys[:num_hit])
            sequence.num_pulled_tokens = num_pulled * self._size
        if self._looks_for_hits(sequence):
            self.num_query_tokens += sequence.num_tokens
            self.num_hit_tokens += sequence.num_computed_tokens
            self.tier_hits.note(sequence, keys[:num_hit], hit.blocks)
        if self._shared:
            for key in keys[num_hit:]:
                self._computing.setdefault(key, sequence)

    def reserve(self, sequence: Sequence, num_blocks: int, *, guaranteed: bool) -> None:
        """Reserve the blocks that are missing until the table has ``num_blocks``."""
        sequence.num_reserved_blocks = max(0, num_blocks - len(sequence.block_table))
        sequence.guaranteed = guaranteed
        self.num_reserved_blocks += sequence.num_reserved_blocks
        if guaranteed:
            self.num_guaranteed_blocks += sequence.num_reserved_blocks

    def allocate_slots(self, sequence: Sequence, num_tokens: int) -> bool:
        """Allocate slots for the next ``num_tokens`` tokens, in blocks of the sequence's own.

        Returns False, and changes nothing, if there are too few free blocks.
        """
        table = sequence.block_table
        end = sequence.num_computed_tokens + num_tokens
        missing = -(-end // self._size) - len(table)
        if missing <= 0 and not sequence.tail_shared:
            return True
        tail = sequence.num_computed_tokens // self._size
        copied = sequence.tail_shared and self.pool.num_references(table[tail]) > 1
        missing = max(missing, 0) + copied
        kept_for_others = self.num_guaranteed_blocks
        if sequence.guaranteed:
            kept_for_others -= sequence.num_reserved_blocks
        if missing > self.pool.num_free_blocks - kept_for_others:
            return False
        blocks = self.pool.allocate(missing)
        assert blocks is not None
        self._use_reservation(sequence, missing)
        if copied:
            own = blocks.pop()
            self._memory.copy_block(table[tail], own)
            self.pool.free((table[tail],))
            table[tail] = own
        sequence.tail_shared = False
        table += blocks
        return True

    def allocate_ahead(self, sequence: Sequence, num_tokens: int) -> int:
        """Allocate slots for up to ``num_tokens`` tokens after the next one of a decoding sequence.

        They are in free blocks that are not reserved for other sequences. Returns the number of
        slots.
        """
        table = sequence.block_table
        end = sequence.num_computed_tokens + 1
        missing = -(-(end + num_tokens) // self._size) - len(table)
        if missing > 0:
            promised = self.num_reserved_blocks
            if sequence.guaranteed:
                promised -= sequence.num_reserved_blocks
            missing = min(missing, max(0, self.pool.num_free_blocks - promised))
            blocks = self.pool.allocate(missing)
            assert blocks is not None
            if sequence.guaranteed:
                self._use_reservation(sequence, missing)
            table += blocks
        return min(num_tokens, len(table) * self._size - end)

    def free_ahead(self, sequence: Sequence, num_tokens: int = 0) -> None:
        """Free the blocks of a decoding sequence, except those of its computed tokens and of
        ``num_tokens`` more."""
        table = sequence.block_table
        end = -(-(sequence.num_computed_tokens + num_tokens) // self._size)
        unused = table[end:]
        if not unused:
            return
        del table[end:]
        if not sequence.contents_finite:
            self._memory.scrub(unused)
        self.pool.free(reversed(unused))
        if sequence.guaranteed:
            sequence.num_reserved_blocks += len(unused)
            self.num_reserved_blocks += len(unused)
            self.num_guaranteed_blocks += len(unused)

    def cache_full_blocks(self, sequence: Sequence, num_tokens: int) -> None:
        """Put the full blocks of the first ``num_tokens`` tokens, which are known and finite, into
        the prefix cache."""
        first, end = sequence.num_cached_blocks, num_tokens // self._size
        if end <= first:
            return
        sequence.num_cached_blocks = end
        if self._shared:
            self._publish(sequence, first, end)

    def _publish(self, sequence: Sequence, first: int, end: int) -> None:
        """Insert full blocks into the prefix cache by their keys."""
        self._extend_keys(sequence, end)
        for key, block in zip(
            sequence.block_keys[first:end], sequence.block_table[first:end], strict=True
        ):
            self.cached.insert(key, block)
            if self._computing.get(key) is sequence:
                del self._computing[key]

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Begin the child's table with all blocks that the parent has computed."""
        for block in parent.block_table:
            self.pool.share(block)
        child.block_table = list(parent.block_table)
        child.block_keys = list(parent.block_keys)
        child.num_cached_blocks = parent.num_cached_blocks
        child.num_computed_tokens = parent.num_computed_tokens
        if parent.num_computed_tokens % self._size:
            parent.tail_shared = child.tail_shared = True

    def preempt(
        self, sequence: Sequence, now_s: float, recompute_s: Callable[[int], float]
    ) -> None:
        """Release the table of a sequence that will be admitted again.

        Its cached blocks can be found until their memory is needed. If copying them to host memory
        and back takes less time than ``recompute_s`` of their tokens, host memory keeps them.
        """
        num_cached = sequence.num_cached_blocks
        if not self._shared:
            self._publish(sequence, 0, num_cached)
        if self.host is not None and num_cached > 0:
            swap_s = 2 * self.host.copies_s(num_cached)
            if swap_s < recompute_s(num_cached * self._size):
                sequence.pinned_keys = self.cached.swap_out(
                    sequence.block_keys[:num_cached], sequence.block_table[:num_cached]
                )
        self.release(sequence, now_s)

    def unpin(self, sequence: Sequence) -> None:
        """Unpin the host memory of a preempted sequence that no longer waits."""
        if sequence.pinned_keys:
            assert self.host is not None
            self.host.unpin(sequence.pinned_keys)
            sequence.pinned_keys = []

    def release(self, sequence: Sequence, now_s: float) -> None:
        """Release the table.

        Cached blocks that others may find stay until their memory is needed.
        """
        if not sequence.contents_finite:
            self._memory.scrub(sequence.block_table[sequence.num_cached_blocks :])
            sequence.contents_finite = True
        if self._computing:
            for key in sequence.block_keys[sequence.num_cached_blocks :]:
                if self._computing.get(key) is sequence:
                    del self._computing[key]
        if self._shared:
            keys = sequence.block_keys[: sequence.num_cached_blocks]
            self.cached.note_use(reversed(keys))
            self.on_release(keys, now_s)
        self._use_reservation(sequence, sequence.num_reserved_blocks)
        # The tail goes idle first: without its head it could not be found.
        self.pool.free(reversed(sequence.block_table), now_s)
        sequence.block_table = []
        sequence.num_cached_blocks = 0
        sequence.num_computed_tokens = 0
        sequence.tail_shared = False

    def num_exclusive_blocks(self, sequence: Sequence, besides: frozenset[int]) -> int:
        """Return the number of blocks, without ``besides``, that become free when the sequence is
        released."""
        references = self.pool.num_references
        return sum(references(b) == 1 and b not in besides for b in sequence.block_table)

    def _use_reservation(self, sequence: Sequence, num_blocks: int) -> None:
        kept = min(num_blocks, sequence.num_reserved_blocks)
        sequence.num_reserved_blocks -= kept
        self.num_reserved_blocks -= kept
        if sequence.guaranteed:
            self.num_guaranteed_blocks -= kept

    def _extend_keys(self, sequence: Sequence, num_blocks: int) -> None:
        if len(sequence.block_keys) < num_blocks:
            if self._shared:
                root = root_key(sequence.request.cache_salt)
            else:
                # Choices of one request may share blocks.
                root = root_key(f"{sequence.arrival - sequence.choice} alone")
            extend_keys(
                sequence.block_keys,
                root,
                sequence.token_ids,
                num_blocks=num_blocks,
                block_size_tokens=self._size,
            )

    def check_integrity(self, running: list[Sequence], waiting: list[Sequence]) -> None:
        """Raise AssertionError unless pool, caches and sequences agree."""
        self.cached.check_integrity(key for s in waiting for key in s.pinned_keys)
        assert not any(sequence.pinned_keys for sequence in running)
        held = Counter(self.lent_blocks())
        for sequence in running:
            table = sequence.block_table
            assert sequence.num_computed_tokens <= len(table) * self._size, "tokens without blocks"
            assert sequence.num_cached_blocks <= sequence.num_computed_tokens // self._size
            for index, block in enumerate(table):
                held[block] += 1
                shared = self.pool.num_references(block) > 1
                assert not shared or index < sequence.num_cached_blocks or sequence.tail_shared, (
                    f"block {block} is shared, but may be written"
                )
        for block in range(self.pool.num_blocks):
            assert self.pool.num_references(block) == held[block], f"block {block} leaks"
        reserved = sum(s.num_reserved_blocks for s in running)
        guaranteed = sum(s.num_reserved_blocks for s in running if s.guaranteed)
        assert (reserved, guaranteed) == (self.num_reserved_blocks, self.num_guaranteed_blocks)
        assert guaranteed <= self.pool.num_free_blocks, "guaranteed blocks are gone"
        assert all(owner in running for owner in self._computing.values())
