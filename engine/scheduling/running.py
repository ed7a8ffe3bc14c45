"""Ranks, the sequences in the batch by rank, and background work, which gives way to other work."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable
from operator import attrgetter
from typing import NamedTuple

from millrace.engine.step.adapter_pool import AdapterPool
from millrace.engine.step.sequence import Rank, Sequence, SequenceState

# Shares of slots and blocks, so that arrivals find the rest free: for all background work that is
# not preempted, and for a single sequence of it.
_SHARE_OF_ALL = 1 / 4
_SHARE_OF_ONE = 1 / 2
_rank = attrgetter("rank")


class RunningSequences(list[Sequence]):
    """Running sequences, the highest rank first. Their adapters stay in memory."""

    def __init__(self, adapters: AdapterPool) -> None:
        super().__init__()
        self._adapters = adapters

    def enter(self, sequence: Sequence) -> None:
        """Put a sequence into the batch."""
        sequence.enter(SequenceState.RUNNING)
        self._adapters.enter(sequence)
        insort(self, sequence, key=_rank)

    def leave(self, sequence: Sequence) -> None:
        """Take a sequence out of the batch. The caller changes its state."""
        index = bisect_left(self, sequence.rank, key=_rank)
        assert self[index] is sequence
        del self[index]
        self._adapters.leave(sequence)

    def has_slot(self, newcomer: Sequence, num_leaving: int, num_slots: int) -> bool:
        """Return whether there is a slot for ``newcomer`` once ``num_leaving`` running sequences
        have left.

        Slots that a running fork group needs are not free. The first sequence of a fork group needs
        slots for the whole group, unless it runs alone. Otherwise sequences of several groups would
        fill the batch, each waiting for others that do not fit.
        """
        num_taken = len(self) - num_leaving
        if num_taken <= 0:
            return num_slots > 0
        num_running = Counter(s.fork_group for s in self if s.fork_group is not None)
        own = newcomer.fork_group
        if own in num_running:
            del num_running[own]  # its group's need includes this slot
        elif own is not None:
            num_taken += own.num_slots - 1
        num_taken += sum(group.num_slots - num for group, num in num_running.items())
        return bool(num_taken < num_slots)


class RunningWork(NamedTuple):
    """Sequences in the batch by the work that they have; held ones are left out.

    Attributes:
        decoding: Sequences with one token to compute.
        prefilling: Sequences with several tokens to compute.
        ending: Sequences whose last token only has to be read.
        num_awaited: Number of awaited sequences.
    """

    decoding: list[Sequence]
    prefilling: list[Sequence]
    ending: list[Sequence]
    num_awaited: int


def work_of(running: Iterable[Sequence]) -> RunningWork:
    """Group running sequences by their work, in their order."""
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
    """Compute the rank of a sequence, which never changes.

    It is the priority, or with ``ageing_s`` the time of arrival, moved back by ``ageing_s`` seconds
    for each level of priority.
    """
    priority = sequence.request.priority
    if ageing_s is not None:
        return (int(priority < 0), sequence.added_s - priority * ageing_s, sequence.arrival)
    return (-priority, 0.0, sequence.arrival)


def is_background(sequence: Sequence) -> bool:
    """Return whether a sequence is background work: its priority is below 0, and it ranks last."""
    return sequence.rank[0] > 0


def non_preemptible(running: Iterable[Sequence], num_slots: int, num_blocks: int) -> set[Sequence]:
    """Return the running sequences that may not be preempted. ``running`` is sorted by rank.

    They are guaranteed sequences: all that are not background work, and background work up to a
    quarter of ``num_slots`` and ``num_blocks`` together, or a single sequence up to half of them.
    So background work that was preempted often proceeds one by one, and never blocks all other
    work.
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
