"""Arrivals of blocks in host memory, for sequences that wait for them."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

from millrace.engine.kv.block_tables import BlockTables
from millrace.engine.step.sequence import Sequence, SequenceState

_log = logging.getLogger(__name__)

# Maximum and minimum timeout of a wait. In between, the timeout is the time to compute the blocks.
# A thread may wait for a core for almost as long as the minimum.
_TIMEOUT_S = 2.0
_SHORTEST_TIMEOUT_S = 0.1

Source = Literal["disk", "object", "peer"]


class TierPart:
    """Blocks that one tier copies into slots of host memory.

    Attributes:
        sequence: The sequence that asked first.
        due_s: Predicted time of completion.
        deadline_s: Time after which the sequence computes the blocks.
        num_good: Number of leading blocks that arrived, once the part is done.
    """

    __slots__ = (
        "begun_s",
        "deadline_s",
        "due_s",
        "host_slots",
        "keys",
        "num_good",
        "sequence",
        "tier",
    )

    def __init__(
        self,
        sequence: Sequence,
        tier: CacheTier,
        keys: list[bytes],
        begun_s: float,
        timeout_s: float,
    ) -> None:
        self.sequence = sequence
        self.tier = tier
        self.keys = keys
        self.host_slots: list[int] = []
        self.begun_s = begun_s
        self.deadline_s = begun_s + timeout_s
        self.due_s = begun_s
        self.num_good = 0


class CacheTier(Protocol):
    """Tier from which blocks can be fetched: a disk, an object store or another worker's engine.

    All methods are for the step's thread; ``begin`` starts work on other threads.
    """

    @property
    def source(self) -> Source: ...

    def has(self, sequence: Sequence, key: bytes, index: int, /) -> bool:
        """Return whether block ``index`` of a sequence, with this key, is likely to be in the
        tier."""

    def brings_s(self, sequence: Sequence, num_blocks: int, /) -> float:
        """Predict the seconds to fetch ``num_blocks`` for a sequence, if the tier has them."""

    def begin(self, part: TierPart, on_done: Callable[[TierPart], None]) -> None:
        """Start to fetch a part. ``on_done`` is always called with it, on any thread."""

    def finish(self, part: TierPart, now_s: float) -> None:
        """Record the result of a part that is done, before its blocks are used."""


class _Found(NamedTuple):
    """Location of a block that the device lacks: a tier, a part on its way, or else host memory."""

    key: bytes
    tier: CacheTier | None = None
    coming: TierPart | None = None


class _Arrival:
    """Sequence that waits for parts."""

    __slots__ = ("deadline_s", "parts", "sequence")

    def __init__(self, sequence: Sequence, parts: set[TierPart], deadline_s: float) -> None:
        self.sequence = sequence
        self.parts = parts
        self.deadline_s = deadline_s


class BlockArrivals:
    """Fetcher of the missing blocks of a new sequence's prefix into host memory.

    Each block is fetched from the fastest tier that has it. The sequence is not ``ready`` until its
    blocks have arrived or a deadline has passed, while others run; blocks that do not arrive are
    computed. Blocks that are already on their way for another sequence are not fetched twice.
    ``compute_s`` predicts the seconds to compute a number of tokens (0: not known yet). ``wake`` is
    called on any thread when there is something to ``settle``.
    """

    def __init__(
        self,
        tables: BlockTables,
        compute_s: Callable[[int], float],
        wake: Callable[[], None],
        monotonic: Callable[[], float] = time.perf_counter,
    ) -> None:
        assert tables.host is not None
        self._tables = tables
        self._host = tables.host
        self._compute_s = compute_s
        self._wake = wake
        self._monotonic = monotonic
        self._tiers: list[CacheTier] = []
        self._coming: dict[bytes, TierPart] = {}
        self._parts: set[TierPart] = set()
        self._done: deque[TierPart] = deque()
        self._waiting: list[_Arrival] = []
        self._ahead: set[bytes] = set()

    @property
    def is_busy(self) -> bool:
        """True while blocks are on their way."""
        return bool(self._parts)

    @property
    def num_coming_tokens(self) -> int:
        """Number of prefix tokens on their way."""
        return len(self._coming) * self._tables.pool.block_size_tokens

    def add_tier(self, tier: CacheTier) -> None:
        """Add a tier to fetch blocks from."""
        self._tiers.append(tier)

    def fetch(self, sequence: Sequence) -> bool:
        """Start to fetch the missing blocks of a new sequence's prefix, if that is faster than
        computing them.

        Returns:
            Whether the sequence has to wait.
        """
        if not self._tiers:
            return False
        found = self._worth_waiting(sequence, self._look(sequence))
        held = [one.key for one in found if one.tier is None and one.coming is None]
        coming = [one.coming for one in found if one.coming is not None]
        wanted: dict[CacheTier, list[bytes]] = {}
        for one in found:
            if one.tier is not None:
                wanted.setdefault(one.tier, []).append(one.key)
        self._take_over(sequence, held)
        timeout_s = self._timeout_s(sequence, wanted, coming)
        if timeout_s is None:
            return False
        self._host.pin(held)  # before other blocks need the slots
        sequence.pinned_keys = held
        new = self._begin(sequence, wanted, timeout_s)
        parts = {*coming, *new}
        if not parts:
            return False
        self._waiting.append(_Arrival(sequence, parts, self._monotonic() + timeout_s))
        sequence.ready = False
        for part in new:
            part.tier.begin(part, self._note_done)
        return True

    def _look(self, sequence: Sequence) -> list[_Found]:
        """Find the blocks of its prefix that the device lacks, up to the first that no tier has."""
        found: list[_Found] = []
        keys = self._tables.keys_to_find(sequence)
        tiers = sorted(self._tiers, key=lambda tier: tier.brings_s(sequence, len(keys)))
        for index, key in enumerate(keys):
            if self._tables.cached.block_of(key) is not None:
                continue
            if key in self._host:
                found.append(_Found(key))
            elif key in self._coming:
                found.append(_Found(key, coming=self._coming[key]))
            else:
                tier = next((tier for tier in tiers if tier.has(sequence, key, index)), None)
                if tier is None:
                    break
                found.append(_Found(key, tier))
        return found

    def _worth_waiting(self, sequence: Sequence, found: list[_Found]) -> list[_Found]:
        """Return the blocks before the first one of a tier that is slower than computing its
        blocks."""
        size = self._tables.pool.block_size_tokens
        while not sequence.request.warms:
            counts = Counter(one.tier for one in found if one.tier is not None)
            slow = {
                tier
                for tier, count in counts.items()
                if 0 < self._compute_s(count * size) <= tier.brings_s(sequence, count)
            }
            if not slow:
                break
            found = found[: next(n for n, one in enumerate(found) if one.tier in slow)]
        return found

    def keep_for_another(self, sequence: Sequence) -> None:
        """Keep the blocks that a sequence has pulled for a later sequence, which counts them as
        pulled."""
        self._ahead = {key for key in self._ahead if key in self._host} | sequence.pulled_keys

    def _take_over(self, sequence: Sequence, held: list[bytes]) -> None:
        if self._ahead and not sequence.request.warms:
            mine = self._ahead.intersection(held)
            self._ahead -= mine
            sequence.pulled_keys |= mine

    def _timeout_s(
        self, sequence: Sequence, wanted: dict[CacheTier, list[bytes]], coming: list[TierPart]
    ) -> float | None:
        """Return the seconds to wait for fetched blocks.

        Returns None if there is nothing to wait for, or if computing the blocks is predicted to be
        faster.
        """
        num_blocks = len(coming) + sum(map(len, wanted.values()))
        if not num_blocks:
            return None
        if sequence.request.warms:
            return _TIMEOUT_S  # no client waits for this sequence
        computed_s = self._compute_s(num_blocks * self._tables.pool.block_size_tokens)
        now_s = self._monotonic()
        brought_s = [tier.brings_s(sequence, len(keys)) for tier, keys in wanted.items()]
        if 0 < computed_s <= max((*brought_s, *(part.due_s - now_s for part in coming))):
            return None
        return min(max(computed_s, _SHORTEST_TIMEOUT_S), _TIMEOUT_S) if computed_s else _TIMEOUT_S

    def _begin(
        self, sequence: Sequence, wanted: dict[CacheTier, list[bytes]], timeout_s: float
    ) -> list[TierPart]:
        """Make parts for as many blocks as host memory has slots, from the beginning of the
        prefix."""
        now_s = self._monotonic()
        slots = self._host.reserve(sum(map(len, wanted.values())))
        parts = [TierPart(sequence, tier, keys, now_s, timeout_s) for tier, keys in wanted.items()]
        for part in parts:
            part.keys = part.keys[: len(slots)]
            part.host_slots, slots = slots[: len(part.keys)], slots[len(part.keys) :]
            part.due_s = now_s + part.tier.brings_s(sequence, len(part.keys))
        parts = [part for part in parts if part.keys]
        self._parts.update(parts)
        for part in parts:
            self._coming |= dict.fromkeys(part.keys, part)
        return parts

    def _note_done(self, part: TierPart) -> None:
        self._done.append(part)
        self._wake()

    def settle(self) -> list[Sequence]:
        """Take over blocks that have arrived. Return the sequences that no longer wait."""
        while self._done:
            self._finish(self._done.popleft())
        ready: list[Sequence] = []
        if not self._waiting:
            return ready
        now_s = self._monotonic()
        for arrival in self._waiting:
            if arrival.parts and now_s > arrival.deadline_s:
                _log.warning("KV cache blocks did not arrive in time; a prompt is computed")
                arrival.parts.clear()
            if not arrival.parts and arrival.sequence.state is not SequenceState.FINISHED:
                arrival.sequence.ready = True
                ready.append(arrival.sequence)
        self._waiting = [arrival for arrival in self._waiting if arrival.parts]
        return ready

    def _finish(self, part: TierPart) -> None:
        self._parts.remove(part)
        for key in part.keys:
            del self._coming[key]
        part.tier.finish(part, self._monotonic())
        good = part.keys[: part.num_good]
        self._host.insert(good, part.host_slots[: len(good)])
        self._host.give_back(part.host_slots[len(good) :])
        for arrival in self._waiting:
            if part in arrival.parts:
                arrival.parts.remove(part)
                self._hold(arrival.sequence, good, part.tier)

    def _hold(self, sequence: Sequence, good: list[bytes], tier: CacheTier) -> None:
        """Pin the blocks that arrived for a sequence until it is admitted."""
        if sequence.state is SequenceState.FINISHED:
            return
        own = set(sequence.block_keys)
        mine = [key for key in good if key in own]
        match tier.source:
            case "peer":
                sequence.pulled_keys |= set(mine)
                sequence.pulled_s = self._monotonic() - sequence.added_s
            case "disk":
                sequence.disk_keys |= set(mine)
            case "object":
                sequence.object_keys |= set(mine)
        self._host.pin(mine)
        sequence.pinned_keys = [*sequence.pinned_keys, *mine]

    def check_integrity(self) -> None:
        """Raise AssertionError unless parts, keys and slots of host memory agree."""
        assert self._coming.keys() == {key for part in self._parts for key in part.keys}
        slots = [slot for part in self._parts for slot in part.host_slots]
        assert set(slots) == self._host.reserved, "a slot is reserved for nothing"
        assert all(arrival.parts <= self._parts for arrival in self._waiting)
