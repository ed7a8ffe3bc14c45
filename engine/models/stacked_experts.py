"""Mixture of experts over stacked weights, computed without synchronising with the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from millrace.engine.kernels.gpu.kernel_set import ExpertKernels, Stack
from millrace.engine.kernels.gpu.sorted_choices import SortedChoices, sort_by_expert
from millrace.engine.kernels.operations import Linear, WeightSize, total_size
from millrace.registry.checkpoints.families import ExpertsConfig


class StackedExperts(NamedTuple):
    """Mixture of stacked experts, of which ``num_chosen`` compute each row.

    ``router`` scores the experts. ``gate_up`` is [num_experts, 2 * inner_size, hidden_size],
    ``down`` is [num_experts, hidden_size, inner_size]. ``kernels`` multiply tensors; other stacks
    multiply themselves.

    With ``fixed`` it is batch-invariant: a row's result does not depend on other rows. With
    ``is_part`` it has one rank's experts, from ``first_expert`` on; results of experts on other
    ranks are left out.
    """

    router: Linear
    gate_up: Stack
    down: Stack
    num_chosen: int
    normalized: bool
    kernels: ExpertKernels
    fixed: bool
    first_expert: int = 0
    is_part: bool = False

    @property
    def size(self) -> WeightSize:
        return total_size((self.router.size, _size(self.gate_up), _size(self.down)))

    def plus(
        self,
        total: torch.Tensor,
        rows: torch.Tensor,
        swiglu: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Return ``total`` plus the mixture's output for ``rows``, both [num_rows, hidden_size].

        Overwrites ``total``.
        """
        kernels = self.kernels
        scores = self.router(rows)
        weights, chosen = kernels.route(scores, self.num_chosen, normalized=self.normalized)
        elsewhere = None
        if self.is_part:
            chosen = chosen - self.first_expert
            elsewhere = (chosen < 0) | (chosen >= len(self.gate_up))
            # An index behind all local experts: the products skip it and leave the results
            # undefined.
            chosen = chosen.masked_fill(elsewhere, len(self.gate_up))
        choices = sort_by_expert(chosen, len(self.gate_up))
        inner = swiglu(self._products(self.gate_up, rows, choices))
        results = self._products(self.down, inner, choices, weights)
        if elsewhere is not None:
            results.masked_fill_(elsewhere.unsqueeze(-1), 0.0)
        return kernels.add_choices(total, results)

    def _products(
        self,
        stack: Stack,
        rows: torch.Tensor,
        choices: SortedChoices,
        weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        num_chosen, fixed = self.num_chosen, self.fixed
        if isinstance(stack, torch.Tensor):
            return self.kernels.products(
                rows, stack, choices, num_chosen=num_chosen, weights=weights, fixed=fixed
            )
        return stack.products(rows, choices, num_chosen=num_chosen, weights=weights, fixed=fixed)


def _size(stack: Stack) -> WeightSize:
    return WeightSize.of(stack) if isinstance(stack, torch.Tensor) else stack.size


def stacked_experts(
    kernels: ExpertKernels,
    product: Callable[[torch.Tensor, torch.Tensor | None], Linear],
    *,
    fixed: bool,
) -> Callable[[torch.Tensor, Stack, Stack, ExpertsConfig], StackedExperts]:
    """Return a maker of mixtures by ``kernels``, with routers by ``product``."""

    def make(
        router: torch.Tensor, gate_up: Stack, down: Stack, experts: ExpertsConfig
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
