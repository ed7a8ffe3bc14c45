"""Mixture of experts over stacked weights; the products read the routing on the host."""

from __future__ import annotations

import torch

from millrace.engine.kernels.gpu.sorted_choices import SortedChoices


def route(
    scores: torch.Tensor, num_chosen: int, *, normalized: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts, see ``engine.kernels.gpu.experts``."""
    values = scores.float()
    ranked = values.nan_to_num(nan=-torch.inf).sort(stable=True, descending=True)
    chosen = ranked.indices[:, :num_chosen]
    weights = values.softmax(-1).gather(-1, chosen)
    if normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, chosen.to(torch.int16)


def products(
    rows: torch.Tensor,
    stack: torch.Tensor,
    choices: SortedChoices,
    *,
    num_chosen: int,
    weights: torch.Tensor | None = None,
    fixed: bool = False,  # noqa: ARG001 (each row is computed by itself)
) -> torch.Tensor:
    """Multiply with the chosen experts, see ``engine.kernels.gpu.experts``."""
    own = rows[choices.order // num_chosen] if weights is None else rows
    made = own.new_empty(len(own), stack.shape[1], dtype=torch.float32)
    start = 0
    for expert, end in enumerate(choices.ends.tolist()):
        # Row by row: torch's order of summation depends on the matrix's height.
        for row in range(start, end):
            made[row] = stack[expert].float() @ own[row].float()
        start = end
    if weights is None:
        return made.to(rows.dtype)
    weighted = made * weights.flatten()[choices.order, None]
    results = torch.empty_like(weighted).index_copy_(0, choices.order, weighted)
    return results.view(*weights.shape, stack.shape[1]).to(rows.dtype)


def add_choices(total: torch.Tensor, results: torch.Tensor) -> torch.Tensor:
    """Sum each row's choices, see ``engine.kernels.gpu.experts``."""
    return total.copy_(total.float() + results.float().sum(1))
