"""Hidden states of a model's own layers, kept as input of an EAGLE-3 head."""

from __future__ import annotations

from typing import NamedTuple

import torch

from millrace.engine.step.batch import FlatBatch

# Maximum tokens of a sequence that wait for a head: the context length that heads are trained with.
MOST_WAITING_TOKENS = 2048


class Features:
    """Hidden states of a sequence's consecutive tokens ``begin`` … ``end - 1``, one row each."""

    __slots__ = ("_pieces", "begin", "end")

    def __init__(self) -> None:
        self.begin = self.end = 0
        self._pieces: list[torch.Tensor] = []

    def add(self, begin: int, rows: torch.Tensor) -> None:
        """Add the ``rows`` of the tokens from ``begin`` on, and replace rows that were known from
        there on.

        If there is a gap, all tokens before it are dropped. If too many tokens wait, the first are
        dropped.
        """
        if not self.begin <= begin <= self.end:
            self.begin = self.end = begin
            self._pieces = []
        while self.end > begin:
            last = self._pieces.pop()
            self.end -= len(last)
            if self.end < begin:
                self._pieces.append(last[: begin - self.end])
                self.end = begin
        self._pieces.append(rows)
        self.end += len(rows)
        self.drop_before(self.end - MOST_WAITING_TOKENS)

    def rows(self, begin: int, end: int) -> torch.Tensor:
        """Return the rows of the tokens ``begin`` … ``end - 1``, all of which must be known."""
        assert self.begin <= begin < end <= self.end, "these rows are not known"
        picked: list[torch.Tensor] = []
        at = self.begin
        for piece in self._pieces:
            if at + len(piece) > begin and at < end:
                picked.append(piece[max(0, begin - at) : end - at])
            at += len(piece)
        return picked[0] if len(picked) == 1 else torch.cat(picked)

    def drop_before(self, begin: int) -> None:
        """Drop the rows of the tokens before ``begin``."""
        num_gone = 0
        while self.begin < min(begin, self.end):
            first = self._pieces[num_gone]
            if self.begin + len(first) > begin:
                self._pieces[num_gone] = first[begin - self.begin :].clone()
                self.begin = begin
            else:
                self.begin += len(first)
                num_gone += 1
        del self._pieces[:num_gone]

    def copy(self) -> Features:
        """Copy the features for a fork of the sequence."""
        other = Features()
        other.begin, other.end, other._pieces = self.begin, self.end, list(self._pieces)
        return other


class HeadInputs(NamedTuple):
    """Input of a head for the tokens of a sequence.

    The first token is ``start``; its row of ``features`` is that of the token before it. For tokens
    after the known ones, ``own`` is the head's output for the token before, [hidden_size].
    """

    features: Features
    start: int
    own: torch.Tensor | None = None


def give_features(batch: FlatBatch, features: torch.Tensor) -> None:
    """Add to each sequence that draws tokens its rows of a batch's ``features``."""
    rows = list(zip(batch.sequences, batch.ranges, strict=True))
    # Add chunks of a prompt before the tokens that follow it.
    for sequence, (start, num_tokens, begin, _) in (
        rows[batch.num_single :] + rows[: batch.num_single]
    ):
        if sequence.request.pooling is not None or sequence.fork_group is not None:
            continue
        if sequence.features is None:
            sequence.features = Features()
        sequence.features.add(begin, features[start : start + num_tokens].clone())
