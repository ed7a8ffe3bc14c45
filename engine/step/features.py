"""Hidden states of a model's own layers, kept for a head that drafts from them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from millrace.engine.step.batch import FlatBatch

# Of a sequence so many tokens wait for a head, at most: as many as heads are trained to look at.
MOST_WAITING_TOKENS = 2048


class Features:
    """Those of a sequence's consecutive tokens ``begin`` … ``end - 1``: a row each."""

    __slots__ = ("_pieces", "begin", "end")

    def __init__(self) -> None:
        self.begin = self.end = 0
        self._pieces: list[torch.Tensor] = []

    def add(self, begin: int, rows: torch.Tensor) -> None:
        """Keep the ``rows`` of the tokens from ``begin`` on, in place of what was known from there
        on. Tokens before a gap are forgotten, and the first ones where too many wait."""
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
        """Those of the tokens ``begin`` … ``end - 1``, all of which are known."""
        assert self.begin <= begin < end <= self.end, "these features are not there"
        picked: list[torch.Tensor] = []
        at = self.begin
        for piece in self._pieces:
            if at + len(piece) > begin and at < end:
                picked.append(piece[max(0, begin - at) : end - at])
            at += len(piece)
        return picked[0] if len(picked) == 1 else torch.cat(picked)

    def drop_before(self, begin: int) -> None:
        """Forget the tokens before ``begin``."""
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
        """The same, to go another way from here."""
        other = Features()
        other.begin, other.end, other._pieces = self.begin, self.end, list(self._pieces)
        return other


class HeadInputs(NamedTuple):
    """What a head computes the tokens of a sequence from. Its first token is ``start``, with the
    features of the token before it, out of ``features``; tokens behind those that are known have
    the head's ``own`` output for the token before, [hidden_size]."""

    features: Features
    start: int
    own: torch.Tensor | None = None


def give_features(batch: FlatBatch, features: torch.Tensor) -> None:
    """Hand each sequence that draws tokens its rows of a batch's ``features``."""
    rows = list(zip(batch.sequences, batch.ranges, strict=True))
    # Chunks of a prompt go before what was made behind it.
    for sequence, (start, num_tokens, begin, _) in (
        rows[batch.num_single :] + rows[: batch.num_single]
    ):
        if sequence.request.pooling is not None or sequence.fork_group is not None:
            continue
        if sequence.features is None:
            sequence.features = Features()
        sequence.features.add(begin, features[start : start + num_tokens].clone())
