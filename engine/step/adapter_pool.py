"""Pool of LoRA adapters in memory, one per slot, with LRU eviction."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from millrace.engine.step.sequence import Rank, Sequence, SequenceState
from millrace.engine.threads.tasks import TaskThreads
from millrace.schemas.models.adapters import AdapterRef, LoadedAdapter

# Several threads, so that a slow download does not delay other loads.
_NUM_THREADS = 4
# Loading threads have a lower priority than steps.
_NICENESS = 10
# Weight of the latest load time in the EWMA of load times.
_LATEST_SHARE = 0.3

# Reads an adapter's files and prepares its weights for the runner in the slot of this number. Steps
# that are launched from then on do not read the slot's former contents. Called on a thread of its
# own. Raises AdapterError.
LoadAdapter = Callable[[AdapterRef, int], Any]


@dataclass(slots=True)
class _Slot:
    """Slot of one adapter.

    ``weights`` is None while they load; ``waiting`` are the sequences that wait for the load.
    """

    number: int
    adapter: AdapterRef
    waiting: dict[Sequence, None]
    weights: Any = None
    num_running: int = 0


class _Loaded(NamedTuple):
    slot: _Slot
    weights: Any
    error: Exception | None
    load_s: float


class AdapterPool:
    """Pool that loads adapters on background threads while other sequences run.

    A sequence whose adapter is not loaded is not ``ready`` until it is. An adapter that a sequence
    in the batch uses is not evicted. If all slots are in use and a sequence waits for a slot, the
    loaded adapter with the fewest running sequences admits no sequence of a lower rank than the
    first that waits. This prevents starvation. An adapter is identified by its version. A failed
    load ends the sequences that wait for it; later sequences try again.

    Not thread-safe, except for the results that loading threads hand over.
    """

    def __init__(
        self,
        num_slots: int,
        load: LoadAdapter,
        on_loaded: Callable[[], None],
        monotonic: Callable[[], float] = time.perf_counter,
        threads: TaskThreads | None = None,
    ) -> None:
        """Create the pool.

        A loading thread calls ``on_loaded`` when ``settle`` has something to do.
        """
        self.num_slots = num_slots
        self.load_s = 0.0
        self.num_loads = 0
        self.num_evictions = 0
        self._load = load
        self._on_loaded = on_loaded
        self._monotonic = monotonic
        self._threads = threads or TaskThreads("adapter-load", _NUM_THREADS, niceness=_NICENESS)
        # Slots by adapter version, the least recently used first.
        self._slots: collections.OrderedDict[str, _Slot] = collections.OrderedDict()
        self._free = list(range(num_slots))
        self._loaded: collections.deque[_Loaded] = collections.deque()
        self._queued: dict[Sequence, None] = {}
        # Sequences by adapter version, from ``prepare`` to ``forget``.
        self._live: dict[str, set[Sequence]] = {}

    def loaded(self) -> tuple[LoadedAdapter, ...]:
        """Return the loaded adapters, the most recently used last."""
        return tuple(
            LoadedAdapter(slot.adapter.name, slot.adapter.version, slot.num_running)
            for slot in self._slots.values()
            if slot.weights is not None
        )

    def prepare(self, sequence: Sequence) -> None:
        """Start to load a new sequence's adapter, unless that evicts an adapter that others
        need."""
        adapter = sequence.request.adapter
        if adapter is None:
            return
        self._live.setdefault(adapter.version, set()).add(sequence)
        if adapter.version not in self._slots:
            self._begin(adapter, {})

    def forget(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended and left the batch."""
        version = _version(sequence)
        live = self._live.get(version)
        if live is not None:
            live.discard(sequence)
            if not live:
                del self._live[version]

    def admits(self, sequence: Sequence) -> bool:
        """Return whether a waiting sequence can begin. If not, it is not ``ready`` until it can."""
        adapter = sequence.request.adapter
        if adapter is None:
            return True
        slot = self._slots.get(adapter.version)
        if (
            slot is not None
            and slot.weights is not None
            and not self._is_reserved_for_higher_rank(slot, sequence)
        ):
            return True
        sequence.ready = False
        if slot is not None and slot.weights is None:
            slot.waiting[sequence] = None
        else:
            self._queued[sequence] = None
            self._begin_queued()
        return False

    def enter(self, sequence: Sequence) -> None:
        """Pin the adapter of a sequence that enters the batch after ``admits`` allowed it."""
        adapter = sequence.request.adapter
        if adapter is not None:
            slot = self._slots[adapter.version]
            assert slot.weights is not None
            slot.num_running += 1
            sequence.adapter_weights = slot.weights
            self._slots.move_to_end(adapter.version)

    def leave(self, sequence: Sequence) -> None:
        """Unpin the adapter of a sequence that leaves the batch."""
        adapter = sequence.request.adapter
        if adapter is not None:
            sequence.adapter_weights = None
            self._slots[adapter.version].num_running -= 1

    def settle(self) -> list[tuple[Sequence, Exception]]:
        """Take over finished loads, and start loads for which there is a slot now.

        Returns:
            Sequences whose adapter could not be loaded, each with the error.
        """
        failed: list[tuple[Sequence, Exception]] = []
        while self._loaded:
            slot, weights, error, load_s = self._loaded.popleft()
            waiting, slot.waiting = slot.waiting, {}
            if error is None:
                slot.weights = weights
                self.num_loads += 1
                self.load_s += (load_s - self.load_s) * (_LATEST_SHARE if self.load_s else 1.0)
            else:
                self._clear(slot.adapter.version)
                failed += [(one, error) for one in waiting if not _is_over(one)]
            for sequence in waiting:
                sequence.ready = True
        if self._queued:
            self._begin_queued()
        return failed

    def _is_reserved_for_higher_rank(self, slot: _Slot, sequence: Sequence) -> bool:
        """Return whether the slot is reserved for a waiting sequence of a higher rank."""
        first = self._first_queued()
        if first is None or first.rank > sequence.rank:
            return False
        used = [other for other in self._slots.values() if other.weights is not None]
        return slot is min(used, key=lambda other: other.num_running)

    def _first_queued(self) -> Sequence | None:
        if not self._queued:
            return None
        self._queued = {one: None for one in self._queued if not _is_over(one)}
        return min(self._queued, key=lambda one: one.rank, default=None)

    def _begin_queued(self) -> None:
        """Start loads for sequences that wait for a slot, the highest rank first, while slots
        last."""
        while (first := self._first_queued()) is not None:
            adapter = first.request.adapter
            assert adapter is not None
            same = [one for one in self._queued if _version(one) == adapter.version]
            slot = self._slots.get(adapter.version)
            if slot is None and not self._begin(adapter, dict.fromkeys(same), first.rank):
                return
            if slot is not None and slot.weights is None:
                slot.waiting.update(dict.fromkeys(same))
            elif slot is not None:
                for sequence in same:
                    sequence.ready = True
            for sequence in same:
                del self._queued[sequence]

    def _begin(
        self, adapter: AdapterRef, waiting: dict[Sequence, None], rank: Rank | None = None
    ) -> bool:
        """Load an adapter into a free slot, or into the slot of an evicted adapter.

        Returns False if no adapter can be evicted: each is loading, is used by the batch, or is
        needed by a waiting sequence of this ``rank`` or a higher one (without ``rank``: of any
        rank).
        """
        if len(self._slots) >= self.num_slots:
            victim = self._victim(rank)
            if victim is None:
                return False
            self._clear(victim)
            self.num_evictions += 1
        slot = self._slots[adapter.version] = _Slot(self._free.pop(), adapter, waiting)
        self._threads.submit(partial(self._load_now, slot))
        return True

    def _clear(self, version: str) -> None:
        self._free.append(self._slots.pop(version).number)

    def _victim(self, rank: Rank | None) -> str | None:
        """Return the version to evict; None if there is none."""
        asked_for: list[str] = []
        for version, slot in self._slots.items():
            if slot.weights is None or slot.num_running:
                continue
            live = self._live.get(version)
            if not live:
                return version
            if rank is not None and rank < min(one.rank for one in live):
                asked_for.append(version)
        return asked_for[0] if asked_for else None

    def _load_now(self, slot: _Slot) -> None:
        begin_s = self._monotonic()
        weights, error = None, None
        try:
            weights = self._load(slot.adapter, slot.number)
        except Exception as caught:  # noqa: BLE001 (it ends the waiting sequences only)
            error = caught
        self._loaded.append(_Loaded(slot, weights, error, self._monotonic() - begin_s))
        self._on_loaded()

    def check_integrity(self, running: list[Sequence]) -> None:
        """Raise AssertionError unless slots and the sequences in the batch agree."""
        numbers = [*self._free, *(slot.number for slot in self._slots.values())]
        assert sorted(numbers) == list(range(self.num_slots))
        for version, slot in self._slots.items():
            users = [one for one in running if _version(one) == version]
            assert slot.num_running == len(users)
            assert all(one.adapter_weights is slot.weights for one in users)


def _version(sequence: Sequence) -> str:
    adapter = sequence.request.adapter
    return "" if adapter is None else adapter.version


def _is_over(sequence: Sequence) -> bool:
    return sequence.state is SequenceState.FINISHED
