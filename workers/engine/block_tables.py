"""Blocks of sequences: where they come from, who shares them, where they go."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from workers.engine.block_pool import BlockPool
from workers.engine.prefix_cache import PrefixCache, extend_keys, root_key
from workers.engine.sequence import Sequence


class BlockMemory(Protocol):
    """What is done to the contents of blocks; ``workers.engine.kv_cache.KVCache`` is the one."""

    def scrub(self, blocks: list[int]) -> None:
        """Zero those whose contents are not finite."""

    def copy_block(self, source: int, target: int) -> None:
        """Give one block the contents of another."""


class PrefixHit(NamedTuple):
    """Cached blocks that a sequence begins with, and how many of them are idle. ``awaited`` is
    true when the block behind them is being computed for somebody else right now."""

    blocks: list[int]
    num_idle: int
    awaited: bool


NO_HIT = PrefixHit([], 0, awaited=False)


class BlockTables:
    """Allocates, shares and frees the blocks of sequences.

    A block of a sequence's table is *sealed* once it is full, computed and known to be finite;
    sealed blocks are never written again, and with the prefix cache others find them by their
    tokens. Only the last block of a table is ever written; while it is shared (between choices of
    one request), the first writer copies it.

    ``num_promised_blocks`` are spoken for by sequences that were admitted with them in mind; of
    them, ``num_reserved_blocks`` by sequences that nobody else's growth may take them from.
    """

    def __init__(self, pool: BlockPool, memory: BlockMemory, *, cache: PrefixCache | None) -> None:
        self.pool = pool
        self._memory = memory
        self._cache = cache
        self._size = pool.block_size_tokens
        self._computing: dict[bytes, Sequence] = {}
        self.num_promised_blocks = 0
        self.num_reserved_blocks = 0
        self.num_query_tokens = 0
        self.num_hit_tokens = 0

    @classmethod
    def make(
        cls, num_blocks: int, block_size_tokens: int, memory: BlockMemory, *, prefix_cache: bool
    ) -> BlockTables:
        """Tables over a pool of their own."""
        if not prefix_cache:
            return cls(BlockPool(num_blocks, block_size_tokens), memory, cache=None)
        cache = PrefixCache()
        return cls(BlockPool(num_blocks, block_size_tokens, cache.forget), memory, cache=cache)

    @property
    def num_evicted_blocks(self) -> int:
        return 0 if self._cache is None else self._cache.num_evicted_blocks

    def match(self, sequence: Sequence) -> PrefixHit:
        """The longest cached prefix that leaves at least one token to compute; changes nothing."""
        cache = self._cache
        if cache is None or not sequence.takes_prefix_hits:
            return NO_HIT
        num_blocks = (sequence.num_tokens - 1) // self._size
        self._extend_keys(sequence, num_blocks)
        blocks: list[int] = []
        num_idle = 0
        for key in sequence.block_keys[:num_blocks]:
            block = cache.get(key)
            if block is None:
                # One of lower rank may be stuck for as long as this one is in the queue.
                owner = self._computing.get(key)
                awaited = owner is not None and owner.rank < sequence.rank
                return PrefixHit(blocks, num_idle, awaited)
            blocks.append(block)
            num_idle += self.pool.is_idle(block)
        return PrefixHit(blocks, num_idle, awaited=False)

    def take(self, sequence: Sequence, hit: PrefixHit) -> None:
        """Begin a table with a hit that ``match`` has just found."""
        assert not sequence.block_table
        for block in hit.blocks:
            self.pool.share(block)
        sequence.block_table = list(hit.blocks)
        sequence.num_sealed_blocks = len(hit.blocks)
        sequence.num_computed_tokens = len(hit.blocks) * self._size
        if self._cache is None:
            return
        num_blocks = (sequence.num_tokens - 1) // self._size
        self._extend_keys(sequence, num_blocks)
        for key in sequence.block_keys[len(hit.blocks) : num_blocks]:
            self._computing.setdefault(key, sequence)
        if sequence.takes_prefix_hits:
            self.num_query_tokens += sequence.num_tokens
            self.num_hit_tokens += sequence.num_computed_tokens
            if not sequence.started:
                sequence.num_cached_tokens = sequence.num_computed_tokens

    def promise(self, sequence: Sequence, num_blocks: int, *, reserved: bool) -> None:
        """Speak for the blocks that are missing until the table has ``num_blocks``."""
        sequence.num_promised_blocks = max(0, num_blocks - len(sequence.block_table))
        sequence.reserved = reserved
        self.num_promised_blocks += sequence.num_promised_blocks
        if reserved:
            self.num_reserved_blocks += sequence.num_promised_blocks

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Have room for the next ``num_tokens`` tokens, in blocks that are the sequence's own.

        False, and nothing changed, if blocks lack.
        """
        table = sequence.block_table
        end = sequence.num_computed_tokens + num_tokens
        missing = -(-end // self._size) - len(table)
        if missing <= 0 and not sequence.tail_shared:
            return True
        tail = sequence.num_computed_tokens // self._size
        copied = sequence.tail_shared and self.pool.num_references(table[tail]) > 1
        missing = max(missing, 0) + copied
        kept_for_others = self.num_reserved_blocks
        if sequence.reserved:
            kept_for_others -= sequence.num_promised_blocks
        if missing > self.pool.num_free_blocks - kept_for_others:
            return False
        blocks = self.pool.allocate(missing)
        assert blocks is not None
        self._fulfil(sequence, missing)
        if copied:
            own = blocks.pop()
            self._memory.copy_block(table[tail], own)
            self.pool.free((table[tail],))
            table[tail] = own
        sequence.tail_shared = False
        table += blocks
        return True

    def seal(self, sequence: Sequence) -> None:
        """Note that everything computed so far is finite, and let others find the full blocks."""
        first, end = sequence.num_sealed_blocks, sequence.num_computed_tokens // self._size
        if end == first:
            return
        sequence.num_sealed_blocks = end
        if self._cache is None:
            return
        self._extend_keys(sequence, end)
        for key, block in zip(
            sequence.block_keys[first:end], sequence.block_table[first:end], strict=True
        ):
            if self._cache.insert(key, block):
                self.pool.keep(block)
            if self._computing.get(key) is sequence:
                del self._computing[key]

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Begin the child's table with all that the parent has computed."""
        for block in parent.block_table:
            self.pool.share(block)
        child.block_table = list(parent.block_table)
        child.block_keys = list(parent.block_keys)
        child.num_sealed_blocks = parent.num_sealed_blocks
        child.num_computed_tokens = parent.num_computed_tokens
        if parent.num_computed_tokens % self._size:
            parent.tail_shared = child.tail_shared = True

    def release(self, sequence: Sequence, now_s: float) -> None:
        """Take the table back; what was sealed stays to be found as long as its memory is free."""
        if not sequence.contents_finite:
            self._memory.scrub(sequence.block_table[sequence.num_sealed_blocks :])
            sequence.contents_finite = True
        if self._computing:
            for key in sequence.block_keys[sequence.num_sealed_blocks :]:
                if self._computing.get(key) is sequence:
                    del self._computing[key]
        self._fulfil(sequence, sequence.num_promised_blocks)
        # The tail goes idle first: without its head it would be of no use.
        self.pool.free(reversed(sequence.block_table), now_s)
        sequence.block_table = []
        sequence.num_sealed_blocks = 0
        sequence.num_computed_tokens = 0
        sequence.tail_shared = False

    def num_exclusive_blocks(self, sequence: Sequence, besides: frozenset[int]) -> int:
        """How many blocks, not counting some, come free when the sequence is released."""
        references = self.pool.num_references
        return sum(references(b) == 1 and b not in besides for b in sequence.block_table)

    def _fulfil(self, sequence: Sequence, num_blocks: int) -> None:
        kept = min(num_blocks, sequence.num_promised_blocks)
        sequence.num_promised_blocks -= kept
        self.num_promised_blocks -= kept
        if sequence.reserved:
            self.num_reserved_blocks -= kept

    def _extend_keys(self, sequence: Sequence, num_blocks: int) -> None:
        if len(sequence.block_keys) < num_blocks:
            extend_keys(
                sequence.block_keys,
                root_key(sequence.request.cache_salt),
                sequence.token_ids,
                num_blocks=num_blocks,
                block_size_tokens=self._size,
            )

    def check_integrity(self, running: list[Sequence]) -> None:
        """Raise AssertionError unless pool, cache and the tables of ``running`` agree."""
        self.pool.check_integrity()
        if self._cache is not None:
            self._cache.check_integrity(self.pool.kept_blocks())
        held: dict[int, int] = {}
        for sequence in running:
            table = sequence.block_table
            assert sequence.num_computed_tokens <= len(table) * self._size, "tokens without blocks"
            assert sequence.num_sealed_blocks <= sequence.num_computed_tokens // self._size
            for index, block in enumerate(table):
                held[block] = held.get(block, 0) + 1
                shared = self.pool.num_references(block) > 1
                assert not shared or index < sequence.num_sealed_blocks or sequence.tail_shared, (
                    f"block {block} is shared, but may be written"
                )
        for block in range(self.pool.num_blocks):
            assert self.pool.num_references(block) == held.get(block, 0), f"block {block} leaks"
        promised = sum(s.num_promised_blocks for s in running)
        reserved = sum(s.num_promised_blocks for s in running if s.reserved)
        assert (promised, reserved) == (self.num_promised_blocks, self.num_reserved_blocks)
        assert reserved <= self.pool.num_free_blocks, "reserved blocks are gone"
        assert all(owner in running for owner in self._computing.values())
