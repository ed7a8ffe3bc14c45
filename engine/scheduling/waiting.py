"""The sequences that are not in the batch yet, by rank."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from millrace.engine.step.sequence import Rank, Sequence, SequenceState

# Entries of sequences that were removed are dropped together once they are this many and most.
_MAX_DEAD_ENTRIES = 64


class WaitingQueue:
    """A heap by rank, and beside it those that are not ready, in order of arrival: they wait for
    their grammar, or for a token of theirs to be read.

    A sequence in here is WAITING; O(log n) each, removal O(1) amortised.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, Sequence]] = []
        self._queued: set[Sequence] = set()
        self._unready: dict[Sequence, None] = {}

    def __len__(self) -> int:
        return len(self._queued) + len(self._unready)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._queued
        yield from self._unready

    @property
    def num_unready(self) -> int:
        """Those that were not ready when they were last looked at."""
        return len(self._unready)

    def add(self, sequence: Sequence) -> None:
        sequence.enter(SequenceState.WAITING)
        ready = sequence.ready and not sequence.has_unread_token
        if not ready or not all(fork.ready for fork in sequence.forks):
            self._unready[sequence] = None
            return
        self._queued.add(sequence)
        heapq.heappush(self._heap, (sequence.rank, sequence))

    def remove(self, sequence: Sequence) -> None:
        if sequence in self._unready:
            del self._unready[sequence]
            return
        self._queued.remove(sequence)
        num_dead = len(self._heap) - len(self._queued)
        if num_dead > _MAX_DEAD_ENTRIES and num_dead > len(self._queued):
            self._heap = [entry for entry in self._heap if entry[1] in self._queued]
            heapq.heapify(self._heap)

    def pop(self) -> Sequence | None:
        """Take out the highest rank of those that are ready."""
        while self._heap:
            sequence = heapq.heappop(self._heap)[1]
            if sequence in self._queued:
                self._queued.remove(sequence)
                return sequence
        return None

    def first(self) -> Sequence | None:
        """The highest rank of those that are ready; it stays."""
        while self._heap and self._heap[0][1] not in self._queued:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def collect_ready(self) -> None:
        """Queue those that have become ready; another thread may say so at any time."""
        if self._unready:
            unready, self._unready = self._unready, {}
            for sequence in unready:
                self.add(sequence)

    def check_integrity(self) -> None:
        """Raise AssertionError unless heap and sets agree, and nobody in here holds blocks."""
        entries = [sequence for _, sequence in self._heap if sequence in self._queued]
        assert len(entries) == len(set(entries)) == len(self._queued), "the heap lost somebody"
        assert self._queued.isdisjoint(self._unready)
        for sequence in self:
            assert sequence.state is SequenceState.WAITING
            assert not sequence.block_table, "a waiting sequence holds blocks"
            assert sequence.num_computed_tokens == 0
