"""The adapters in memory, as many as there are slots; the least recently used goes first."""

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

# What one fetches from afar does not hold up the others.
_NUM_THREADS = 4
# Steps of those that run go before a load.
_NICENESS = 10
# Of the mean load time, what the latest one counts.
_LATEST_SHARE = 0.3

# Reads an adapter's files and makes of them what the runner multiplies with, in the slot of this
# number, whose former contents no step reads any more that is launched from now on. Called on a
# thread of its own. Raises AdapterError.
LoadAdapter = Callable[[AdapterRef, int], Any]


@dataclass(slots=True)
class _Slot:
    """``weights`` is None while they are loaded; ``waiting`` are sequences that wait for that."""

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
    """Loads adapters when sequences ask for them, on threads, while others go on. Not thread-safe
    but for what those threads hand over.

    A sequence that cannot begin yet is not ``ready``, and becomes so. An adapter that a sequence in
    the batch has stays where it is. Where all slots are used so, the least used is no longer given
    to sequences of a lower rank than the first that waits for a slot: so nobody waits for ever. An
    adapter is known by its version. A load that fails ends the sequences that wait for it; who
    comes later tries again.
    """

    def __init__(
        self,
        num_slots: int,
        load: LoadAdapter,
        on_loaded: Callable[[], None],
        monotonic: Callable[[], float] = time.perf_counter,
        threads: TaskThreads | None = None,
    ) -> None:
        """``on_loaded`` is called on a loading thread when there is something to ``settle``."""
        self.num_slots = num_slots
        self.load_s = 0.0
        self.num_loads = 0
        self.num_evictions = 0
        self._load = load
        self._on_loaded = on_loaded
        self._monotonic = monotonic
        self._threads = threads or TaskThreads("adapter-load", _NUM_THREADS, niceness=_NICENESS)
        # By version, the least recently used first.
        self._slots: collections.OrderedDict[str, _Slot] = collections.OrderedDict()
        self._free = list(range(num_slots))
        self._loaded: collections.deque[_Loaded] = collections.deque()
        self._queued: dict[Sequence, None] = {}
        # Those of each version that were prepared for and not forgotten.
        self._live: dict[str, set[Sequence]] = {}

    def loaded(self) -> tuple[LoadedAdapter, ...]:
        """Those that are there, the most recently used last."""
        return tuple(
            LoadedAdapter(slot.adapter.name, slot.adapter.version, slot.num_running)
            for slot in self._slots.values()
            if slot.weights is not None
        )

    def prepare(self, sequence: Sequence) -> None:
        """Begin to load what a newcomer will need, unless what others need has to go for that."""
        adapter = sequence.request.adapter
        if adapter is None:
            return
        self._live.setdefault(adapter.version, set()).add(sequence)
        if adapter.version not in self._slots:
            self._begin(adapter, {})

    def forget(self, sequence: Sequence) -> None:
        """A sequence is over; it is in the batch no more."""
        version = _version(sequence)
        live = self._live.get(version)
        if live is not None:
            live.discard(sequence)
            if not live:
                del self._live[version]

    def admits(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence can begin; else it is not ``ready`` until it can."""
        adapter = sequence.request.adapter
        if adapter is None:
            return True
        slot = self._slots.get(adapter.version)
        if slot is not None and slot.weights is not None and not self._gives_way(slot, sequence):
            return True
        sequence.ready = False
        if slot is not None and slot.weights is None:
            slot.waiting[sequence] = None
        else:
            self._queued[sequence] = None
            self._begin_queued()
        return False

    def enter(self, sequence: Sequence) -> None:
        """A sequence, which ``admits`` let in, is in the batch: its adapter stays."""
        adapter = sequence.request.adapter
        if adapter is not None:
            slot = self._slots[adapter.version]
            assert slot.weights is not None
            slot.num_running += 1
            sequence.adapter_weights = slot.weights
            self._slots.move_to_end(adapter.version)

    def leave(self, sequence: Sequence) -> None:
        """A sequence is not in the batch any more."""
        adapter = sequence.request.adapter
        if adapter is not None:
            sequence.adapter_weights = None
            self._slots[adapter.version].num_running -= 1

    def settle(self) -> list[tuple[Sequence, Exception]]:
        """Take in what was loaded since, and load what has room now. Returns sequences that cannot
        have their adapter, and why."""
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

    def _gives_way(self, slot: _Slot, sequence: Sequence) -> bool:
        """Whether a slot is kept from a sequence for one of a higher rank that waits for a slot."""
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
        """Load for those that wait for a slot, the highest rank first, as long as there is one."""
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
        """Load an adapter, in place of another if there is no free slot; False if none can go: one
        that the batch has, or one that is asked for by a sequence of a higher rank, or of any."""
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
        """The version that goes first."""
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
        except Exception as caught:  # noqa: BLE001 (whatever it is, it ends those that wait only)
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
