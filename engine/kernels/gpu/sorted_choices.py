"""Choices of experts, those of one expert together."""

from __future__ import annotations

from typing import NamedTuple

import torch


class SortedChoices(NamedTuple):
    """``order``: int64 [num_choices], the choices sorted by expert, those of one expert in their
    order; ``ends``: int32 [num_experts], behind the last of each expert's."""

    order: torch.Tensor
    ends: torch.Tensor

    def shape_of(self, weights: torch.Tensor | None) -> tuple[int, ...]:
        """Without the width, that of a product: of the choices as they are sorted, or of those that
        ``weights`` [num_rows, num_chosen] has."""
        return (len(self.order),) if weights is None else tuple(weights.shape)


def sort_by_expert(chosen: torch.Tensor, num_experts: int) -> SortedChoices:
    """Sort ``chosen``, int16 [num_rows, num_chosen], on its device; the host learns nothing."""
    experts, order = chosen.flatten().sort(stable=True)
    numbers = torch.arange(num_experts, dtype=chosen.dtype, device=chosen.device)
    return SortedChoices(order, torch.searchsorted(experts, numbers, right=True, out_int32=True))
