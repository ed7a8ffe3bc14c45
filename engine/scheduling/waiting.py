"""Queue of the sequences that are not in the batch yet, by rank."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from millrace.engine.step.sequence import Rank, Sequence, SequenceState

# Heap entries of removed sequences are dropped together once there are this many, and more than
# live ones.
_MAX_DEAD_ENTRIES = 64


class WaitingQueue:
    """Heap of ready sequences by rank, and a list of sequences that are not ready, in order of
    arrival.

    A sequence is not ready while it waits for its grammar, its adapter or its blocks, or for one of
    its tokens to be read. All sequences in the queue are WAITING. O(log n) per operation; removal
    is O(1) amortised.
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
        """Number of sequences that were not ready when they were last checked."""
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
        """Remove and return the ready sequence of the highest rank; None if there is none."""
        while self._heap:
            sequence = heapq.heappop(self._heap)[1]
            if sequence in self._queued:
                self._queued.remove(sequence)
                return sequence
        return None

    def first(self) -> Sequence | None:
        """Return the ready sequence of the highest rank without removing it; None if there is
        none."""
        while self._heap and self._heap[0][1] not in self._queued:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def collect_ready(self) -> None:
        """Queue the sequences that have become ready.

        Another thread may make them ready at any time.
        """
        if self._unready:
            unready, self._unready = self._unready, {}
            for sequence in unready:
                self.add(sequence)

    def check_integrity(self) -> None:
        """Raise AssertionError unless heap and sets agree, and no waiting sequence holds blocks."""
        entries = [sequence for _, sequence in self._heap if sequence in self._queued]
        assert len(entries) == len(set(entries)) == len(self._queued), "the heap lost a sequence"
        assert self._queued.isdisjoint(self._unready)
        for sequence in self:
            assert sequence.state is SequenceState.WAITING
            assert not sequence.block_table, "a waiting sequence holds blocks"
            assert sequence.num_computed_tokens == 0
