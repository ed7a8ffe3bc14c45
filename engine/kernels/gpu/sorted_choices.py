"""Choices of experts, grouped by expert."""

from __future__ import annotations

from typing import NamedTuple

import torch


class SortedChoices(NamedTuple):
    """Choices sorted by expert.

    ``order`` is int64 [num_choices], the choices in sorted order, stable within an expert. ``ends``
    is int32 [num_experts], the end of each expert's choices.
    """

    order: torch.Tensor
    ends: torch.Tensor

    def shape_of(self, weights: torch.Tensor | None) -> tuple[int, ...]:
        """Return the shape of a product without its width.

        It is that of the sorted choices, or of ``weights`` [num_rows, num_chosen] if given.
        """
        return (len(self.order),) if weights is None else tuple(weights.shape)


def sort_by_expert(chosen: torch.Tensor, num_experts: int) -> SortedChoices:
    """Sort ``chosen``, int16 [num_rows, num_chosen], on its device without a host read."""
    experts, order = chosen.flatten().sort(stable=True)
    numbers = torch.arange(num_experts, dtype=chosen.dtype, device=chosen.device)
    return SortedChoices(order, torch.searchsorted(experts, numbers, right=True, out_int32=True))
