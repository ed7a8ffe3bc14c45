"""The sequences in the batch, by rank."""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter

from millrace.workers.engine.adapters.pool import AdapterPool
from millrace.workers.engine.sequence import Sequence, SequenceState

_rank = attrgetter("rank")


class RunningSequences(list[Sequence]):
    """The highest rank first. Their adapters stay in memory."""

    def __init__(self, adapters: AdapterPool) -> None:
        super().__init__()
        self._adapters = adapters

    def enter(self, sequence: Sequence) -> None:
        """Put a sequence into the batch."""
        sequence.enter(SequenceState.RUNNING)
        self._adapters.enter(sequence)
        insort(self, sequence, key=_rank)

    def leave(self, sequence: Sequence) -> None:
        """Take one out; the caller says what becomes of it."""
        index = bisect_left(self, sequence.rank, key=_rank)
        assert self[index] is sequence
        del self[index]
        self._adapters.leave(sequence)
