"""Mixture of experts of a layer, from the router's scores to the residual sum."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from benchmarks.gpu.kernel_cases import Cost, Work, measure
from benchmarks.gpu.scope import Scope
from millrace.engine.kernels.gpu import experts, rows
from millrace.engine.kernels.gpu.reference import experts as reference
from millrace.engine.kernels.gpu.reference import operations
from millrace.engine.kernels.gpu.sorted_choices import sort_by_expert


class Mixture(NamedTuple):
    """Mixture in which ``num_rows`` rows choose ``num_chosen`` experts each.

    There are enough rows for every expert to be chosen.
    """

    num_rows: int
    num_experts: int
    num_chosen: int
    hidden: int
    inner: int

    def cost(self, itemsize: int) -> Cost:
        """Return the cost: each expert's weights once, and the rows, without cached ones."""
        weights = self.num_experts * 3 * self.hidden * self.inner
        moved = weights + 3 * self.num_rows * self.hidden
        flops = 6 * self.num_rows * self.num_chosen * self.hidden * self.inner
        return Cost(moved * itemsize, flops)


# Shape of Qwen3-30B-A3B.
MIXTURE = Mixture(256, 128, 8, 2048, 768)
_SMOKE_MIXTURE = Mixture(3, 4, 2, 32, 32)


def run(scope: Scope) -> None:
    mixture = _SMOKE_MIXTURE if scope.smoke else MIXTURE
    name = f"{mixture.num_chosen} of {mixture.num_experts} experts, {mixture.num_rows} rows"
    measure(scope, name, partial(_work, scope, mixture), mixture.cost(scope.dtype.itemsize))


def _work(scope: Scope, mixture: Mixture, number: int) -> Work:
    num_rows, num_experts, num_chosen, hidden, inner = mixture
    normal = partial(scope.normal, scope.generator(number))
    scores = normal(num_rows, num_experts)
    normed, total = normal(num_rows, hidden), normal(num_rows, hidden)
    gates = normal(num_experts, 2 * inner, hidden, std=hidden**-0.5)
    downs = normal(num_experts, hidden, inner, std=inner**-0.5)

    def run() -> torch.Tensor:
        weights, chosen = experts.route(scores, num_chosen, normalized=True)
        choices = sort_by_expert(chosen, num_experts)
        gated = rows.swiglu(experts.products(normed, gates, choices, num_chosen=num_chosen))
        return experts.add_choices(
            total, experts.products(gated, downs, choices, num_chosen=num_chosen, weights=weights)
        )

    def expected() -> list[torch.Tensor]:
        weights, chosen = reference.route(scores, num_chosen, normalized=True)
        choices = sort_by_expert(chosen, num_experts)
        wide = reference.products(normed.float(), gates, choices, num_chosen=num_chosen)
        results = reference.products(
            operations.swiglu(wide), downs, choices, num_chosen=num_chosen, weights=weights
        )
        return [reference.add_choices(total.to(torch.float32, copy=True), results)]

    return Work(run, lambda _: [total], expected)
