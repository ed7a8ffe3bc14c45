"""Ranks; the sequences in the batch, by rank; and background work, which makes way for all other
work, and how much of it need not."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable
from operator import attrgetter
from typing import NamedTuple

from millrace.engine.step.adapter_pool import AdapterPool
from millrace.engine.step.sequence import Rank, Sequence, SequenceState

# Of slots and blocks, so that arrivals find the rest at once: what all of it may have that is not
# preempted, and what a single one may.
_SHARE_OF_ALL = 1 / 4
_SHARE_OF_ONE = 1 / 2
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

    def has_slot(self, newcomer: Sequence, num_leaving: int, num_slots: int) -> bool:
        """Whether there is a slot for ``newcomer`` once ``num_leaving`` of the running ones have
        left: one that no sequence of a running fork group needs; and if it is the first of its
        group, slots for the others too, unless it runs alone.

        Otherwise sequences of several groups would fill the batch, each waiting for others that do
        not fit.
        """
        num_taken = len(self) - num_leaving
        if num_taken <= 0:
            return num_slots > 0
        num_running = Counter(s.fork_group for s in self if s.fork_group is not None)
        own = newcomer.fork_group
        if own in num_running:
            del num_running[own]  # one of the slots that its group needs is its own
        elif own is not None:
            num_taken += own.num_slots - 1
        num_taken += sum(group.num_slots - num for group, num in num_running.items())
        return bool(num_taken < num_slots)


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
        if sequence.fork_group is not None and sequence.is_held:
            continue
        num_tokens = len(sequence.token_ids)
        if num_tokens == sequence.max_total_tokens and sequence.has_unread_token:
            ending.append(sequence)
        elif num_tokens - sequence.num_computed_tokens == 1:
            decoding.append(sequence)
        else:
            prefilling.append(sequence)
    return RunningWork(decoding, prefilling, ending, num_awaited)


def rank_of(sequence: Sequence, ageing_s: float | None) -> Rank:
    """The rank that it has for life: its priority, or its time of arrival moved back by
    ``ageing_s`` for each level of priority if that is given."""
    priority = sequence.request.priority
    if ageing_s is not None:
        return (int(priority < 0), sequence.added_s - priority * ageing_s, sequence.arrival)
    return (-priority, 0.0, sequence.arrival)


def is_background(sequence: Sequence) -> bool:
    """Whether it makes way: its priority is below 0. Its rank is behind all others' then."""
    return sequence.rank[0] > 0


def non_preemptible(running: Iterable[Sequence], num_slots: int, num_blocks: int) -> set[Sequence]:
    """The running sequences, given by rank, that may not be preempted.

    They are the guaranteed ones: all that are no background work, and of that as many as together
    have no more than a share of ``num_slots`` and ``num_blocks``, or one that has a larger share
    alone. So background work that was preempted often gets on too, one after the other, and is
    never in the way of all.
    """
    kept: set[Sequence] = set()
    slots = blocks = 0
    share = _SHARE_OF_ONE
    for sequence in running:
        if not sequence.guaranteed:
            continue
        if is_background(sequence):
            own_blocks = len(sequence.block_table) + sequence.num_reserved_blocks
            if slots + 1 > share * num_slots or blocks + own_blocks > share * num_blocks:
                continue
            slots, blocks, share = slots + 1, blocks + own_blocks, _SHARE_OF_ALL
        kept.add(sequence)
    return kept
