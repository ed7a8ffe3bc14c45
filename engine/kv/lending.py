"""Lending of this engine's blocks to peers, which read them."""

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

# Maximum time that blocks are kept for a peer.
LOAN_S = 3.0


class _Held(NamedTuple):
    """Blocks of the cache and keys in host memory that a loan protects from being overwritten."""

    loan: Loan
    places: list[int]
    blocks: list[int]
    keys: list[bytes]
    until_s: float


class Lending:
    """Lender of blocks of the cache and of host memory, in place.

    If other processes cannot map the cache, its blocks are copied into host memory first. Any
    thread may call ``ask``; all other methods are for the step's thread. Requests and ends of loans
    are queued, and ``settle`` processes them. ``wake`` is called when there is something to settle.
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
        # Memory regions of lent blocks.
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
        """True while blocks are lent or requested."""
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
        """Take back loans that have ended or expired, and grant requested ones."""
        while self._ended:
            held = self._lent.pop(self._ended.popleft())
            self.num_served_blocks += len(held.places)
            self._take_back(held)
        now_s = self._monotonic()
        for held in [held for held in self._lent.values() if held.until_s < now_s]:
            # A loan that its peer ends at this moment is taken back by the next call.
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
        """Protect the leading blocks of a loan that are here."""
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
        """Copy the leading blocks that only the cache has into host memory."""
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
            self._host.pin(here)  # so that the new copies do not evict these
            self._host.store(list(missing), list(missing.values()))
            self._host.unpin(here)

    def _share(self, key: bytes) -> int | None:
        """Share the block of the cache with this key.

        Returns None if there is none, or if it is idle and sequences may need its memory.
        """
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
