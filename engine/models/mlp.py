"""Feed-forward part of a layer: a gated MLP or a mixture of experts.

A mixture runs one expert after another if the host can read the routing, as on a CPU. Otherwise the
experts' weights are stacked.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)

from millrace.engine.kernels.operations import (
    Collectives,
    Linear,
    SwiGLU,
    WeightSize,
    total_size,
)
from millrace.engine.models.stacked_experts import StackedExperts


class GatedMLP(NamedTuple):
    """Gated MLP with SwiGLU; ``gate_up`` yields the gate, then the input that it gates."""

    gate_up: Linear
    down: Linear

    @property
    def size(self) -> WeightSize:
        return self.gate_up.size.plus(self.down.size)


class ExpertLoad:
    """Load of experts; ``choices`` counts how often each was chosen for a row since the start."""

    def __init__(self, num_experts: int) -> None:
        self.choices = np.zeros(num_experts, np.int64)


class MixtureOfExperts(NamedTuple):
    """Mixture of experts, of which ``num_chosen`` compute each row.

    ``router`` is [num_experts, hidden_size]. ``experts`` are all experts or one rank's, from
    ``first_expert`` on. Results of experts on other ranks are left out, but counted in ``load``.
    """

    router: torch.Tensor
    experts: tuple[GatedMLP, ...]
    num_chosen: int
    normalized: bool
    first_expert: int = 0
    load: ExpertLoad | None = None

    @property
    def size(self) -> WeightSize:
        return total_size((WeightSize.of(self.router), *(expert.size for expert in self.experts)))


class ReducedExperts(NamedTuple):
    """Mixture whose output is summed over ranks.

    Each rank's ``mixture`` has slices of all experts, or some experts. All ranks of ``collectives``
    compute the same rows at the same time.
    """

    mixture: MixtureOfExperts | StackedExperts
    collectives: Collectives

    @property
    def size(self) -> WeightSize:
        """Size of this rank's part, including the whole router."""
        return self.mixture.size


MLP = GatedMLP | MixtureOfExperts | StackedExperts | ReducedExperts


def plus_mlp(
    total: torch.Tensor,
    rows: torch.Tensor,
    mlp: MLP,
    swiglu: SwiGLU,
) -> torch.Tensor:
    """Return ``total`` plus the output of ``mlp`` for ``rows``, all [num_rows, hidden_size].

    May overwrite ``total``. ``swiglu``: see ``Operations``.
    """
    if isinstance(mlp, GatedMLP):
        return mlp.down.plus(total, mlp.gate_up.gated(rows, swiglu))
    if isinstance(mlp, StackedExperts):
        return mlp.plus(total, rows, swiglu)
    if isinstance(mlp, ReducedExperts):
        part = plus_mlp(torch.zeros_like(total), rows, mlp.mixture, swiglu)
        mlp.collectives.all_reduce(part)
        return total.add_(part)
    return total.add_(_mixed(rows, mlp, swiglu))


def _mixed(rows: torch.Tensor, mixture: MixtureOfExperts, swiglu: SwiGLU) -> torch.Tensor:
    """Compute a mixture, one expert after another, to [num_rows, hidden_size] in float32.

    Rows in float64 stay so.

    Rows are sorted by expert, so that each chosen expert runs once over its rows. A row's results
    are summed in the order of its choices, independent of the rest of the batch.
    """
    scores = F.linear(rows, mixture.router)
    weights, chosen = scores.softmax(-1, dtype=torch.float32).topk(mixture.num_chosen, -1)
    if mixture.normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    counts = flat.bincount(minlength=len(mixture.router)).tolist()
    if mixture.load is not None:
        mixture.load.choices += counts
    is_whole = len(mixture.experts) == len(mixture.router)
    if not is_whole:
        begin, end = mixture.first_expert, mixture.first_expert + len(mixture.experts)
        before = sum(counts[:begin])
        counts = counts[begin:end]
        order = order[before : before + sum(counts)]
    sorted_rows = rows.index_select(0, order // mixture.num_chosen)
    dtype = torch.promote_types(rows.dtype, torch.float32)
    computed = [
        expert.down.plus(torch.zeros(own.shape, dtype=dtype), expert.gate_up.gated(own, swiglu))
        for expert, own in zip(mixture.experts, torch.split(sorted_rows, counts), strict=True)
        if len(own)
    ]
    # Results of experts on other ranks stay 0.
    make = torch.empty if is_whole else torch.zeros
    results = make(len(flat), rows.shape[1], dtype=dtype)
    if computed:
        results.index_copy_(0, order, torch.cat(computed))
    by_choice = results.view(len(rows), mixture.num_chosen, -1)
    return by_choice.mul_(weights.unsqueeze(-1)).sum(1)
