"""The sequences in the batch, by rank."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from operator import attrgetter
from typing import NamedTuple

from millrace.engine.step.adapter_pool import AdapterPool
from millrace.engine.step.sequence import Sequence, SequenceState

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


class RunningWork(NamedTuple):
    """Of the sequences in the batch those that are behind by one token, by more, those of which
    only the last token is to be read, and how many are awaited; none of them if it is held."""

    decoding: list[Sequence]
    prefilling: list[Sequence]
    ending: list[Sequence]
    num_awaited: int


def work_of(running: Iterable[Sequence]) -> RunningWork:
    """What there is to compute of them, in their order."""
    decoding: list[Sequence] = []
    prefilling: list[Sequence] = []
    ending: list[Sequence] = []
    num_awaited = 0
    for sequence in running:
        if sequence.is_awaited:
            num_awaited += 1
            continue
        if sequence.beams is not None and sequence.is_held:
            continue
        num_tokens = len(sequence.token_ids)
        if num_tokens == sequence.max_total_tokens and sequence.has_unread_token:
            ending.append(sequence)
        elif num_tokens - sequence.num_computed_tokens == 1:
            decoding.append(sequence)
        else:
            prefilling.append(sequence)
    return RunningWork(decoding, prefilling, ending, num_awaited)
