"""Host cache: blocks in host memory, of idle conversations and of preempted sequences."""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import NamedTuple, Protocol

_log = logging.getLogger(__name__)

# Copy bandwidth assumed before the first measurement, and weight of the latest measurement in the
# EWMA.
_ASSUMED_BYTES_PER_S = 5e9
_NEWEST_WEIGHT = 0.2
# Maximum bytes of idle blocks that one step copies, in a few milliseconds.
_BYTES_AT_A_TIME = 16 << 20


def _ignore(_key: bytes) -> None:
    """Ignore a change: there is no listener."""


def _keep_nowhere(_keys: list[bytes]) -> None:
    """Ignore new copies: no tier is below."""


class HostMemory(Protocol):
    """Host memory for blocks; ``engine.kv.host_memory`` allocates it.

    ``bytes_per_s`` is the bandwidth of recent copies if they continue after the call that starts
    them; None if the call itself copies.
    """

    num_slots: int
    block_bytes: int

    @property
    def bytes_per_s(self) -> float | None: ...

    def store(self, blocks: list[int], slots: list[int]) -> None:
        """Copy blocks of the cache into slots. Raises RuntimeError if there is no memory."""

    def load(self, slots: list[int], blocks: list[int]) -> None:
        """Copy slots into blocks of the cache."""


class TierFigures(NamedTuple):
    """Capacity of a tier in blocks, blocks in use, and counters of blocks written, read, and not
    readable."""

    num_blocks: int = 0
    num_used: int = 0
    num_written: int = 0
    num_read: int = 0
    num_unreadable: int = 0


class ColderTier(Protocol):
    """Tier below host memory; ``engine.kv.disk_cache`` has one."""

    def __contains__(self, key: bytes, /) -> bool: ...

    def __iter__(self) -> Iterator[bytes]:
        """Iterate over all keys, the longest unused first."""

    def pinned_keys(self) -> Iterator[bytes]:
        """Iterate over the keys that it has pinned in host memory."""

    def figures(self) -> TierFigures:
        """Return capacity and counters."""

    def check_integrity(self) -> None:
        """Raise AssertionError if it is inconsistent."""


class NoTier:
    """Empty tier below host memory."""

    def __contains__(self, key: bytes, /) -> bool:
        return False

    def __iter__(self) -> Iterator[bytes]:
        return iter(())

    def pinned_keys(self) -> Iterator[bytes]:
        return iter(())

    def figures(self) -> TierFigures:
        return TierFigures()

    def check_integrity(self) -> None:
        """Do nothing."""


class HostCache:
    """Index of the slots of host memory by key of the prefix cache, with LRU eviction.

    Pinned slots are not evicted. ``on_change`` is called with an evicted key. ``on_stored`` is
    called with the keys of new copies, which the tier ``below`` may keep. ``pinned_elsewhere`` are
    functions that return keys pinned by others than sequences and the tier below. Each operation is
    O(1) per block beside the copy. ``bytes_per_s`` is the bandwidth of recent copies.
    """

    def __init__(
        self, memory: HostMemory, *, monotonic: Callable[[], float] = time.perf_counter
    ) -> None:
        self._memory = memory
        self._monotonic = monotonic
        self._num_slots = memory.num_slots
        self.on_change: Callable[[bytes], None] = _ignore
        self.on_stored: Callable[[list[bytes]], None] = _keep_nowhere
        self.below: ColderTier = NoTier()
        self.pinned_elsewhere: list[Callable[[], Iterable[bytes]]] = []
        self._reserved: set[int] = set()
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()  # unpinned, the oldest first
        self._pinned: dict[bytes, int] = {}
        self._pins: Counter[bytes] = Counter()
        self._free: list[int] = []
        self._num_used_slots = 0  # later slots were never used and have no memory yet
        self.bytes_per_s = _ASSUMED_BYTES_PER_S
        self.num_stored_blocks = 0
        self.num_loaded_blocks = 0
        self.num_evicted_blocks = 0

    def __len__(self) -> int:
        return len(self._slot_of) + len(self._pinned)

    def __iter__(self) -> Iterator[bytes]:
        """Iterate over all keys, the longest unused first; pinned keys come last."""
        return chain(self._slot_of, self._pinned)

    def __contains__(self, key: bytes) -> bool:
        return key in self._slot_of or key in self._pinned

    @property
    def num_slots(self) -> int:
        return self._num_slots

    @property
    def blocks_at_a_time(self) -> int:
        """Maximum number of idle blocks that one step copies."""
        return max(1, _BYTES_AT_A_TIME // self._memory.block_bytes)

    def copies_s(self, num_blocks: int) -> float:
        """Predict the seconds to copy ``num_blocks`` once."""
        return num_blocks * self._memory.block_bytes / self.bytes_per_s

    def store(self, keys: list[bytes], blocks: list[int]) -> int:
        """Copy the leading blocks for which there is room.

        Returns:
            How many of them are in host memory now, earlier copies included.
        """
        here: dict[bytes, int] = {}  # not evicted for new copies
        new: dict[bytes, int] = {}
        new_blocks: list[int] = []
        num_here = 0
        for key, block in zip(keys, blocks, strict=True):
            if key in self._slot_of:
                here[key] = self._slot_of.pop(key)
            elif key not in self._pinned:
                slot = self._take_slot()
                if slot is None:
                    break
                new[key] = slot
                new_blocks.append(block)
            num_here += 1
        self._slot_of.update(here)
        if new and not self._copy_out(new, new_blocks):
            return 0
        return num_here

    def _take_slot(self) -> int | None:
        if self._free:
            return self._free.pop()
        if self._num_used_slots < self._num_slots:
            self._num_used_slots += 1
            return self._num_used_slots - 1
        if not self._slot_of:
            return None
        self.num_evicted_blocks += 1
        key, slot = self._slot_of.popitem(last=False)
        self.on_change(key)
        return slot

    def _copy_out(self, new: dict[bytes, int], blocks: list[int]) -> bool:
        slots = list(new.values())
        begin_s = self._monotonic()
        try:
            self._memory.store(blocks, slots)
        except RuntimeError:
            _log.exception("no more host memory for the KV cache; the host cache does not grow")
            self._free += slots
            self._num_slots = self._num_used_slots
            return False
        self._measure(len(blocks), self._monotonic() - begin_s)
        self.num_stored_blocks += len(blocks)
        self._slot_of.update(new)
        self.on_stored(list(new))
        return True

    def slot_of(self, key: bytes) -> int:
        """Return the slot of a key, which must be here."""
        slot = self._pinned.get(key)
        return self._slot_of[key] if slot is None else slot

    def reserve(self, count: int) -> list[int]:
        """Reserve up to ``count`` slots for another component to fill."""
        slots: list[int] = []
        while len(slots) < count and (slot := self._take_slot()) is not None:
            slots.append(slot)
        self._reserved.update(slots)
        return slots

    @property
    def reserved(self) -> set[int]:
        """Slots that another component is filling."""
        return self._reserved

    def insert(self, keys: list[bytes], slots: list[int]) -> None:
        """Insert keys whose contents are in reserved slots."""
        for key, slot in zip(keys, slots, strict=True):
            self._reserved.discard(slot)
            if key in self:
                self._free.append(slot)
            else:
                self._slot_of[key] = slot

    def give_back(self, slots: list[int]) -> None:
        """Free slots that were reserved and not filled."""
        self._reserved.difference_update(slots)
        self._free += slots

    def load(self, keys: list[bytes], blocks: list[int]) -> None:
        """Copy the contents of keys, all of which must be here, into blocks of the cache."""
        slots: list[int] = []
        for key in keys:
            slot = self._pinned.get(key)
            if slot is None:
                slot = self._slot_of[key]
                self._slot_of.move_to_end(key)
            slots.append(slot)
        begin_s = self._monotonic()
        self._memory.load(slots, blocks)
        self._measure(len(blocks), self._monotonic() - begin_s)
        self.num_loaded_blocks += len(blocks)

    def pin(self, keys: Iterable[bytes]) -> None:
        """Pin keys that are here. Each pin needs one ``unpin``."""
        for key in keys:
            self._pins[key] += 1
            if key not in self._pinned:
                self._pinned[key] = self._slot_of.pop(key)

    def unpin(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._pins[key] -= 1
            if self._pins[key] == 0:
                del self._pins[key]
                self._slot_of[key] = self._pinned.pop(key)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Forget the ``keys`` that are not pinned."""
        for key in keys:
            slot = self._slot_of.pop(key, None)
            if slot is not None:
                self._free.append(slot)
                self.on_change(key)

    def _measure(self, num_blocks: int, copy_s: float) -> None:
        known = self._memory.bytes_per_s
        if known is not None:
            self.bytes_per_s = known
        elif copy_s > 0:
            measured = num_blocks * self._memory.block_bytes / copy_s
            self.bytes_per_s += _NEWEST_WEIGHT * (measured - self.bytes_per_s)

    def check_integrity(self, pinned_keys: Iterable[bytes]) -> None:
        """Raise AssertionError unless slots and keys agree, and exactly ``pinned_keys`` are
        pinned."""
        slots = [*self._slot_of.values(), *self._pinned.values(), *self._free, *self._reserved]
        assert len(slots) == len(set(slots)) == self._num_used_slots, "a host slot is lost"
        assert all(0 <= slot < self._num_used_slots <= self._num_slots for slot in slots)
        assert self._pinned.keys() == self._pins.keys()
        assert self._slot_of.keys().isdisjoint(self._pinned)
        elsewhere = chain.from_iterable(pinned() for pinned in self.pinned_elsewhere)
        pinned = Counter(chain(pinned_keys, self.below.pinned_keys(), elsewhere))
        assert pinned == self._pins, "pins do not match their users"
        self.below.check_integrity()
