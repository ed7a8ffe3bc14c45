"""Rows of the vocabulary in groups of tokens.

Searches in a row (the largest logit, the tokens above a bound, the winner of a race) look at the
largest logit of each group first, and then only into the few groups that matter. A pass over
128,000 logits takes longer than all the rest.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

GROUP_TOKENS = 64


class ScaledRows(NamedTuple):
    """Rows of a batch, their largest logits and their temperatures, each [num_rows]."""

    rows: torch.Tensor
    best: torch.Tensor
    scales: torch.Tensor

    def take(self, index: torch.Tensor) -> ScaledRows:
        return ScaledRows(*(values.index_select(0, index) for values in self))


class GroupedLogits(NamedTuple):
    """Logits of some rows, in groups, and their largest.

    Attributes:
        members: float32 [num_rows, num_groups, GROUP_TOKENS], contiguous; -inf where a token is
            forbidden or past the vocabulary.
        tops: The largest of each group, [num_rows, num_groups].
        best: The largest of each row, [num_rows].
    """

    members: torch.Tensor
    tops: torch.Tensor
    best: torch.Tensor

    @property
    def num_groups(self) -> int:
        return self.members.shape[1]

    def select(self, rows: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        """Copy groups by row and number: float32 [len(rows), GROUP_TOKENS]."""
        flat = self.members.view(-1, GROUP_TOKENS)
        return flat.index_select(0, rows * self.num_groups + groups)

    def likeliest(self) -> torch.Tensor:
        """Return the token with the largest logit of each row; the first of equals."""
        rows = torch.arange(len(self.best), device=self.best.device)
        groups = first_largest(self.tops)
        return groups * GROUP_TOKENS + first_largest(self.select(rows, groups))

    def scaled(self, rows: ScaledRows, groups: torch.Tensor | None = None) -> torch.Tensor:
        """Compute (logit - best) / temperature: float32 [num_rows, width, GROUP_TOKENS].

        ``groups`` [num_rows, width] are the groups of each row; None: all.
        """
        if groups is None:
            values = self.members.index_select(0, rows.rows)
        else:
            width = groups.shape[1]
            values = self.select(rows.rows.repeat_interleave(width), groups.reshape(-1))
            values = values.view(-1, width, GROUP_TOKENS)
        values -= rows.best[:, None, None]
        values /= rows.scales[:, None, None]
        return values

    def masses(self, rows: ScaledRows) -> torch.Tensor:
        """Sum exp((logit - best) / temperature) over each row: float64, batch-invariant."""
        return self.scaled(rows).exp_().sum(-1).sum(-1, dtype=torch.float64)


def largest(members: torch.Tensor) -> GroupedLogits:
    """Group ``members`` with the largest logits of groups and rows."""
    tops = members.amax(-1)
    return GroupedLogits(members, tops, tops.amax(-1))


def num_groups(vocab_size: int) -> int:
    return -(-vocab_size // GROUP_TOKENS)


def first_largest(values: torch.Tensor) -> torch.Tensor:
    """Return the argmax over the last dimension. ``torch.argmax`` takes more than twice as long."""
    return values.max(-1).indices
