"""Rows of the vocabulary in groups of tokens.

What is asked of a row (its largest logit, the tokens above a bound, the winner of a race) is asked
of its groups first, by the largest logit of each, and then only of the few groups that matter: a
pass over 128,000 logits takes longer than all the rest.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

GROUP_TOKENS = 64


class ScaledRows(NamedTuple):
    """Some rows of a batch, their largest logits and their temperatures, each [num_rows]."""

    rows: torch.Tensor
    best: torch.Tensor
    scales: torch.Tensor

    def take(self, index: torch.Tensor) -> ScaledRows:
        return ScaledRows(*(values.index_select(0, index) for values in self))


class GroupedLogits(NamedTuple):
    """Logits of some rows and their largest.

    ``members``: float32 [num_rows, num_groups, GROUP_TOKENS], contiguous, -inf where a token is
    forbidden or past the vocabulary. ``tops`` [num_rows, num_groups] and ``best`` [num_rows] are
    the largest of each group and row.
    """

    members: torch.Tensor
    tops: torch.Tensor
    best: torch.Tensor

    @property
    def num_groups(self) -> int:
        return self.members.shape[1]

    def select(self, rows: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        """Groups by row and number: float32 [len(rows), GROUP_TOKENS], a copy."""
        flat = self.members.view(-1, GROUP_TOKENS)
        return flat.index_select(0, rows * self.num_groups + groups)

    def likeliest(self) -> torch.Tensor:
        """The token with the largest logit of each row; the first of equals."""
        rows = torch.arange(len(self.best), device=self.best.device)
        groups = first_largest(self.tops)
        return groups * GROUP_TOKENS + first_largest(self.select(rows, groups))

    def scaled(self, rows: ScaledRows, groups: torch.Tensor | None = None) -> torch.Tensor:
        """(logit - best) / temperature of the rows: float32 [num_rows, width, GROUP_TOKENS], of
        ``groups`` [num_rows, width] of each, or of all."""
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
        """The sum of exp((logit - best) / temperature) over each of the rows: float64. The same
        whoever else is in the batch."""
        return self.scaled(rows).exp_().sum(-1).sum(-1, dtype=torch.float64)


def largest(members: torch.Tensor) -> GroupedLogits:
    """``members`` with their largest."""
    tops = members.amax(-1)
    return GroupedLogits(members, tops, tops.amax(-1))


def num_groups(vocab_size: int) -> int:
    return -(-vocab_size // GROUP_TOKENS)


def first_largest(values: torch.Tensor) -> torch.Tensor:
    """argmax over the last dimension; torch's own takes more than twice as long."""
    return values.max(-1).indices
