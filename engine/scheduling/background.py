"""Ranks; and background work, which makes way for all other work, and how much of it need not."""

from __future__ import annotations

from collections.abc import Iterable

from millrace.engine.step.sequence import Rank, Sequence

# Of slots and blocks, so that arrivals find the rest at once: what all of it may have that is not
# preempted, and what a single one may.
_SHARE_OF_ALL = 1 / 4
_SHARE_OF_ONE = 1 / 2


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
