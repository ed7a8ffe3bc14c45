"""What a step computes: its items, and the schedule while it is made."""

from __future__ import annotations

from typing import NamedTuple

from millrace.engine.step.sequence import Sequence


class ScheduledSequence(NamedTuple):
    """Compute the next ``num_tokens`` tokens of ``sequence``, and behind them those that are
    ``proposed`` for it; its blocks are there."""

    sequence: Sequence
    num_tokens: int


class Schedule:
    """The tokens that each sequence computes, and the token budget that is left.

    ``ending`` sequences of the batch only have their last token to be read: they leave before the
    next plan. ``short_of_blocks``: somebody who runs did not get all that it needs.
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
