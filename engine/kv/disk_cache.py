"""Disk cache: blocks of idle conversations on a disk, below host memory. It outlives a restart."""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import NamedTuple, Protocol

from millrace.engine.kv.arrivals import Source, TierPart
from millrace.engine.kv.block_file import BlockFile
from millrace.engine.kv.block_tables import BlockTables
from millrace.engine.kv.host_cache import TierFigures
from millrace.engine.step.sequence import Sequence
from millrace.engine.threads.tasks import TaskThreads

_log = logging.getLogger(__name__)

# Read bandwidth assumed before the first measurement, and weight of the latest measurement in the
# EWMA.
_ASSUMED_BYTES_PER_S = 1e9
_NEWEST_WEIGHT = 0.2
# Limit of blocks that wait to be written, which hold host memory.
_MAX_UNWRITTEN_BYTES = 128 << 20
_NUM_READERS = 2
# Writing has a lower priority than steps. Reading does not, since sequences wait for it.
_WRITE_NICENESS = 10


class SlotMemory(Protocol):
    """Host memory whose slots other threads may fill and read."""

    @property
    def is_settled(self) -> bool:
        """True if all copies that were started are complete."""

    def pieces(self, slot: int) -> list[memoryview]:
        """Return the bytes of a slot, in order."""


class _Written(NamedTuple):
    key: bytes
    slot: int
    error: OSError | None


class DiskCache:
    """Index of the slots of a file by key of the prefix cache, with LRU eviction.

    Blocks that enter host memory are written to the file in the background, and read back as a
    ``CacheTier`` of ``BlockArrivals``. Reads and writes are on threads of their own; all other
    calls are for one thread. ``on_done`` is called on those threads when there is something to
    ``settle``.
    """

    source: Source = "disk"

    def __init__(
        self,
        file: BlockFile,
        memory: SlotMemory,
        tables: BlockTables,
        on_done: Callable[[], None],
        *,
        writers: TaskThreads | None = None,
        readers: TaskThreads | None = None,
    ) -> None:
        self._file = file
        assert tables.host is not None
        self._memory = memory
        self._host = host = tables.host
        self._on_done = on_done
        self._writers = writers or TaskThreads("kv-write", 1, niceness=_WRITE_NICENESS)
        self._readers = readers or TaskThreads("kv-read", _NUM_READERS)
        stored = file.blocks()
        # Of two blocks with one key, the later is used.
        self._slot_of = OrderedDict((one.key, one.slot) for one in stored)
        used = set(self._slot_of.values())
        # Slots from this number on were never used: the file grows as it fills.
        self._num_used_slots = max(used, default=-1) + 1
        self._free = [slot for slot in reversed(range(self._num_used_slots)) if slot not in used]
        self._stamp = stored[-1].stamp if stored else 0
        self._reading: dict[bytes, int] = {}  # not evicted while they are read
        self._num_readers: dict[bytes, int] = {}
        self._writing: dict[bytes, int] = {}
        self._unsettled: list[bytes] = []
        self._unwanted: set[bytes] = set()
        self._written: deque[_Written] = deque()
        self._is_full = False
        self.bytes_per_s = _ASSUMED_BYTES_PER_S
        self.num_written_blocks = 0
        self.num_read_blocks = 0
        self.num_failed_blocks = 0
        host.below = self
        host.on_stored = self._keep
        for key in self._slot_of:
            host.on_change(key)

    def __len__(self) -> int:
        return len(self._slot_of) + len(self._reading)

    def __iter__(self) -> Iterator[bytes]:
        """Iterate over all keys, the longest unused first; keys that are being read come last."""
        return chain(self._slot_of, self._reading)

    def __contains__(self, key: bytes, /) -> bool:
        return key in self._slot_of or key in self._reading

    @property
    def is_busy(self) -> bool:
        """True while blocks are being written or wait for it."""
        return bool(self._writing or self._unsettled)

    def settle(self) -> None:
        """Take over finished writes, and start to write blocks whose copies have settled."""
        while self._written:
            self._note_written(self._written.popleft())
        if self._unsettled and self._memory.is_settled:
            keys, self._unsettled = self._unsettled, []
            for key in keys:
                self._begin_writing(key)

    # --- writing ---

    def _keep(self, keys: list[bytes]) -> None:
        """Write new blocks of host memory, up to the limit of unwritten ones."""
        waiting = len(self._writing) + len(self._unsettled)
        room = _MAX_UNWRITTEN_BYTES // self._file.block_bytes - waiting
        new = [key for key in keys if key not in self and key not in self._writing]
        new = new[: max(room, 0)] if not self._is_full else []
        self._host.pin(new)
        self._unsettled += new

    def _begin_writing(self, key: bytes) -> None:
        slot = None if key in self or key in self._writing else self._take_slot()
        if slot is None:
            self._host.unpin([key])
            return
        self._writing[key] = slot
        self._stamp += 1
        pieces = self._memory.pieces(self._host.slot_of(key))
        self._writers.submit(partial(self._write, key, slot, self._stamp, pieces))

    def _take_slot(self) -> int | None:
        if self._free:
            return self._free.pop()
        if self._num_used_slots < self._file.num_slots:
            self._num_used_slots += 1
            return self._num_used_slots - 1
        if not self._slot_of:
            return None
        key, slot = self._slot_of.popitem(last=False)
        self._host.on_change(key)
        return slot

    def _write(self, key: bytes, slot: int, stamp: int, pieces: list[memoryview]) -> None:
        error = None
        try:
            self._file.write(slot, key, stamp, pieces)
        except OSError as caught:
            error = caught
        self._written.append(_Written(key, slot, error))
        self._on_done()

    def _note_written(self, written: _Written) -> None:
        key, slot, error = written
        del self._writing[key]
        self._host.unpin([key])
        if key in self._unwanted:
            self._unwanted.discard(key)
            self._free.append(slot)
            self._host.forget([key])
            return
        if error is None:
            self._slot_of[key] = slot
            self.num_written_blocks += 1
            self._host.on_change(key)
            return
        if not self._is_full:
            _log.error(
                "writing the KV cache to disk failed; no more blocks are written", exc_info=error
            )
        self._is_full = True
        self._free.append(slot)

    # --- reading ---

    def has(self, _sequence: Sequence, key: bytes, _index: int, /) -> bool:
        """Return whether the file has the key. See ``CacheTier``."""
        return key in self

    def brings_s(self, _sequence: Sequence, num_blocks: int, /) -> float:
        """Predict the seconds of a read. See ``CacheTier``."""
        return num_blocks * self._file.block_bytes / self.bytes_per_s

    def begin(self, part: TierPart, on_done: Callable[[TierPart], None]) -> None:
        """Start to read a part. See ``CacheTier``."""
        slots = [self._begin_reading(key) for key in part.keys]
        self._readers.submit(partial(self._read, part, slots, on_done))

    def _begin_reading(self, key: bytes) -> int:
        slot = self._slot_of.pop(key, None)
        if slot is None:
            slot = self._reading[key]
        self._reading[key] = slot
        self._num_readers[key] = self._num_readers.get(key, 0) + 1
        return slot

    def _read(self, part: TierPart, slots: list[int], on_done: Callable[[TierPart], None]) -> None:
        try:
            for key, slot, host_slot in zip(part.keys, slots, part.host_slots, strict=True):
                if not self._file.read(slot, key, self._memory.pieces(host_slot)):
                    break
                part.num_good += 1
        except OSError:
            _log.exception("reading the KV cache from disk failed")
        on_done(part)

    def finish(self, part: TierPart, now_s: float) -> None:
        """Record the result of a read. See ``CacheTier``."""
        for key in part.keys:
            self._num_readers[key] -= 1
            if not self._num_readers[key]:
                del self._num_readers[key]
                self._slot_of[key] = self._reading.pop(key)
        self.num_read_blocks += part.num_good
        if part.num_good < len(part.keys):
            # Later blocks cannot be used without this one, but may be intact.
            self.num_failed_blocks += 1
            self._forget(part.keys[part.num_good])
        else:
            read_s = max(now_s - part.begun_s, 1e-9)
            measured = part.num_good * self._file.block_bytes / read_s
            self.bytes_per_s += _NEWEST_WEIGHT * (measured - self.bytes_per_s)

    def forget_all(self) -> None:
        """Forget all blocks but those being read.

        Blocks that are being written are dropped, too.
        """
        self._host.unpin(self._unsettled)
        self._unsettled.clear()
        self._unwanted = set(self._writing)
        for key in list(self._slot_of):
            self._forget(key)

    def _forget(self, key: bytes) -> None:
        slot = self._slot_of.pop(key, None)
        if slot is not None:
            self._free.append(slot)
            self._host.on_change(key)

    def figures(self) -> TierFigures:
        """Return capacity and counters."""
        return TierFigures(
            self._file.num_slots,
            len(self),
            self.num_written_blocks,
            self.num_read_blocks,
            self.num_failed_blocks,
        )

    def pinned_keys(self) -> Iterator[bytes]:
        """Iterate over the keys whose copies in host memory are being written."""
        return chain(self._writing, self._unsettled)

    def check_integrity(self) -> None:
        """Raise AssertionError unless slots and keys agree."""
        slots = [
            *self._slot_of.values(),
            *self._reading.values(),
            *self._writing.values(),
            *self._free,
        ]
        assert len(slots) == len(set(slots)) == self._num_used_slots, "a slot on disk is lost"
        assert all(0 <= slot < self._num_used_slots <= self._file.num_slots for slot in slots)
        assert self._slot_of.keys().isdisjoint(self._reading)
        assert self._num_readers.keys() == self._reading.keys()
