"""Schedule of a step: its items, and the budget while it is made."""

from __future__ import annotations

from typing import NamedTuple

from millrace.engine.step.sequence import Sequence


class ScheduledSequence(NamedTuple):
    """Item of a plan: compute the next ``num_tokens`` tokens of ``sequence``, and then its
    ``proposed`` tokens.

    Its blocks are allocated.
    """

    sequence: Sequence
    num_tokens: int


class Schedule:
    """Number of tokens that each sequence computes, and the rest of the token budget.

    ``ending`` sequences only have their last token to be read, and leave before the next plan.
    ``short_of_blocks`` is True if a running sequence did not get all blocks that it needs.
    """

    __slots__ = ("budget", "counts", "ending", "short_of_blocks")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.counts: dict[Sequence, int] = {}
        self.ending: list[Sequence] = []
        self.short_of_blocks = False

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        self.counts[sequence] = num_tokens
        self.budget -= num_tokens

    def remove(self, sequence: Sequence) -> None:
        self.budget += self.counts.pop(sequence, 0)
