"""Blocks of this engine that peers read."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from millrace.engine.kv.block_tables import BlockTables
from millrace.engine.kv.cache import KVCache
from millrace.engine.kv.host_memory import SharedHostMemory
from millrace.engine.transfer.memory import Region
from millrace.engine.transfer.server import Loan
from millrace.engine.transfer.wire import place

# Blocks are not kept for a peer for longer than this.
LOAN_S = 3.0


class _Held(NamedTuple):
    """What a loan keeps from being overwritten: blocks of the cache, and keys in host memory."""

    loan: Loan
    places: list[int]
    blocks: list[int]
    keys: list[bytes]
    until_s: float


class Lending:
    """Lends blocks of the cache and of host memory where they are, if other processes may map the
    cache; else those of the cache are copied into host memory first.

    ``ask`` is for any thread, all else for the one that steps: what is asked and what has ended is
    noted, and ``settle`` grants it and takes it back. ``wake`` is called when there is something to
    settle.
    """

    def __init__(
        self,
        tables: BlockTables,
        cache: KVCache,
        memory: SharedHostMemory,
        wake: Callable[[], None],
        *,
        monotonic: Callable[[], float] = time.perf_counter,
    ) -> None:
        assert tables.host is not None
        assert memory.pages is not None
        self._tables = tables
        self._host = tables.host
        self._memory = memory
        self._wake = wake
        self._monotonic = monotonic
        # The memory where lent blocks are.
        self.regions = [Region(memory.slots(), memory.pages.fd)]
        self._lends_cache = cache.pages is not None
        if cache.pages is not None:
            self.regions.append(Region(cache.blocks.numpy(), cache.pages.fd))
        self._asked: deque[Loan] = deque()
        self._ended: deque[Loan] = deque()
        self._copied: list[_Held] = []
        self._lent: dict[Loan, _Held] = {}
        self.num_served_blocks = 0
        self._host.pinned_elsewhere.append(self._pinned_keys)
        tables.lent_blocks = self._lent_blocks

    @property
    def is_busy(self) -> bool:
        """Whether something is lent, or is to be."""
        return bool(self._asked or self._copied or self._lent)

    def ask(self, keys: list[bytes]) -> Loan:
        """Ask for the first blocks of a prefix."""
        loan = Loan(keys, self._note_end)
        self._asked.append(loan)
        self._wake()
        return loan

    def _note_end(self, loan: Loan) -> None:
        self._ended.append(loan)
        self._wake()

    def settle(self) -> None:
        """Take back what peers have read or keep for too long, and lend what they asked for."""
        while self._ended:
            held = self._lent.pop(self._ended.popleft())
            self.num_served_blocks += len(held.places)
            self._take_back(held)
        now_s = self._monotonic()
        for held in [held for held in self._lent.values() if held.until_s < now_s]:
            # One that the peer ends at this moment is taken back the next time.
            if held.loan.expire():
                self._take_back(self._lent.pop(held.loan))
        while self._asked:
            self._copied.append(self._hold(self._asked.popleft(), now_s))
        if self._copied and (self._lends_cache or self._memory.is_settled):
            copied, self._copied = self._copied, []
            for held in copied:
                self._lend(held)

    def _lend(self, held: _Held) -> None:
        self._lent[held.loan] = held
        if not held.loan.grant(held.places):
            self._take_back(self._lent.pop(held.loan))

    def _hold(self, loan: Loan, now_s: float) -> _Held:
        """Keep as many of the first blocks as there are."""
        held = _Held(loan, [], [], [], now_s + LOAN_S)
        if not self._lends_cache:
            self._copy_out(loan.keys)
        for key in loan.keys:
            if key in self._host:
                self._host.pin((key,))
                held.keys.append(key)
                held.places.append(place(0, self._host.slot_of(key)))
            elif self._lends_cache and (block := self._share(key)) is not None:
                held.blocks.append(block)
                held.places.append(place(1, block))
            else:
                break
        return held

    def _copy_out(self, keys: list[bytes]) -> None:
        """Have copies made of those of the first blocks that are in the cache only."""
        here: list[bytes] = []
        missing: dict[bytes, int] = {}
        for key in keys:
            if key in self._host:
                here.append(key)
            elif (block := self._tables.cached.block_of(key)) is not None:
                missing[key] = block
            else:
                break
        if missing:
            self._host.pin(here)  # the others do not take their place
            self._host.store(list(missing), list(missing.values()))
            self._host.unpin(here)

    def _share(self, key: bytes) -> int | None:
        """Keep the block of the cache that has a key; None if there is none, or if it is idle and
        sequences may need its memory."""
        pool, block = self._tables.pool, self._tables.cached.block_of(key)
        if block is None:
            return None
        if pool.is_idle(block) and pool.num_free_blocks <= self._tables.num_reserved_blocks:
            return None
        pool.share(block)
        return block

    def _take_back(self, held: _Held) -> None:
        self._host.unpin(held.keys)
        self._tables.pool.free(reversed(held.blocks), self._monotonic())

    def _lent_blocks(self) -> Iterator[int]:
        for held in (*self._copied, *self._lent.values()):
            yield from held.blocks

    def _pinned_keys(self) -> Iterator[bytes]:
        for held in (*self._copied, *self._lent.values()):
            yield from held.keys
