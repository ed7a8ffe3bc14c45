"""The feed-forward part of a layer: one gated MLP, or a mixture of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)

from workers.models.projection import Projection, project, project_onto_


class GatedMLP(NamedTuple):
    """SwiGLU. ``gate_up`` yields the gate, then the input that it gates."""

    gate_up: Projection
    down: Projection


class MixtureOfExperts(NamedTuple):
    """``num_chosen`` of the experts compute each row. ``router``: [num_experts, hidden_size]."""

    router: torch.Tensor
    experts: tuple[GatedMLP, ...]
    num_chosen: int
    normalized: bool


def add_mlp_(total: torch.Tensor, rows: torch.Tensor, mlp: GatedMLP | MixtureOfExperts) -> None:
    """Add what ``mlp`` makes of ``rows`` [num_rows, hidden_size] to ``total`` in place."""
    if isinstance(mlp, GatedMLP):
        project_onto_(total, _gated(rows, mlp), mlp.down)
    else:
        total.add_(_mixed(rows, mlp))


def _gated(rows: torch.Tensor, mlp: GatedMLP) -> torch.Tensor:
    gate, up = project(rows, mlp.gate_up).chunk(2, -1)
    return F.silu(gate).mul_(up)


def _mixed(rows: torch.Tensor, mixture: MixtureOfExperts) -> torch.Tensor:
    """Rows sorted by expert, so that each expert that is chosen at all runs once, over its own;
    then each row's results are summed in the order of its choices, whoever else was in the batch.
    """
    scores = F.linear(rows, mixture.router)
    weights, chosen = scores.softmax(-1, dtype=torch.float32).topk(mixture.num_chosen, -1)
    if mixture.normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    sorted_rows = rows.index_select(0, order // mixture.num_chosen)
    counts = flat.bincount(minlength=len(mixture.experts)).tolist()
    results = torch.empty_like(sorted_rows)
    start = 0
    for expert, count in zip(mixture.experts, counts, strict=True):
        if count:
            own = sorted_rows[start : start + count]
            computed = project(_gated(own, expert), expert.down)
            results.index_copy_(0, order[start : start + count], computed)
            start += count
    by_choice = results.view(len(rows), mixture.num_chosen, -1)
    return by_choice.mul_(weights.to(rows.dtype).unsqueeze(-1)).sum(1)
