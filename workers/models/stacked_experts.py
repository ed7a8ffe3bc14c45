"""Mixture of experts over stacked weights, computed without synchronising with the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from millrace.registry.checkpoints.expert_layers import ExpertsConfig
from millrace.workers.kernels.gpu.kernel_set import ExpertKernels
from millrace.workers.kernels.operations import Linear


class StackedExperts(NamedTuple):
    """``num_chosen`` of the experts compute each row. ``router`` scores them; ``gate_up``:
    [num_experts, 2 * inner_size, hidden_size]; ``down``: [num_experts, hidden_size, inner_size].

    If ``fixed``, the result of a row does not depend on the other rows.
    """

    router: Linear
    gate_up: torch.Tensor
    down: torch.Tensor
    num_chosen: int
    normalized: bool
    kernels: ExpertKernels
    fixed: bool

    def plus(
        self,
        total: torch.Tensor,
        rows: torch.Tensor,
        swiglu: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """``total`` plus the mixture's output for ``rows``, both [num_rows, hidden_size]; ``total``
        is overwritten."""
        kernels, fixed = self.kernels, self.fixed
        scores = self.router(rows)
        weights, chosen = kernels.route(scores, self.num_chosen, normalized=self.normalized)
        choices = kernels.sort_by_expert(chosen, len(self.gate_up))
        inner = swiglu(
            kernels.gate_up(rows, self.gate_up, choices, num_chosen=self.num_chosen, fixed=fixed)
        )
        return kernels.add_choices(
            total, kernels.down(inner, self.down, choices, weights, fixed=fixed)
        )


def stacked_experts(
    kernels: ExpertKernels,
    product: Callable[[torch.Tensor, torch.Tensor | None], Linear],
    *,
    fixed: bool,
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, ExpertsConfig], StackedExperts]:
    """Makes mixtures by ``kernels``, with routers by ``product``."""

    def make(
        router: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, experts: ExpertsConfig
    ) -> StackedExperts:
        return StackedExperts(
            router=product(router, None),
            gate_up=gate_up,
            down=down,
            num_chosen=experts.num_chosen,
            normalized=experts.normalized,
            kernels=kernels,
            fixed=fixed,
        )

    return make
