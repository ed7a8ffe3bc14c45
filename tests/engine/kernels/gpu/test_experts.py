"""Experts in a stack: the kernels against plain torch, and both against one expert after
another."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime import interpreter

from millrace.engine.kernels.gpu import experts as triton_experts
from millrace.engine.kernels.gpu.kernel_set import ExpertKernels
from millrace.engine.kernels.gpu.reference import experts as reference_experts
from millrace.engine.kernels.gpu.sorted_choices import sort_by_expert
from millrace.engine.kernels.operations import Linear, WeightSize
from millrace.engine.models.linears import Projection
from millrace.engine.models.mlp import GatedMLP, MixtureOfExperts, plus_mlp
from millrace.engine.models.stacked_experts import StackedExperts
from tests.engine.kernels.gpu.closeness import DTYPES, assert_close

KERNELS: list[ExpertKernels] = [triton_experts, reference_experts]


class Drawn(NamedTuple):
    rows: torch.Tensor
    router: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor

    @classmethod
    def of(
        cls, num_rows: int, hidden: int, inner: int, num_experts: int, dtype: torch.dtype, seed: int
    ) -> Drawn:
        generator = torch.Generator().manual_seed(seed)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator).mul_(size[-1] ** -0.5).to(dtype)

        return cls(
            torch.randn(num_rows, hidden, generator=generator).to(dtype),
            normal(num_experts, hidden),
            normal(num_experts, 2 * inner, hidden),
            normal(num_experts, hidden, inner),
        )


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate).mul_(up)


def stacked(
    drawn: Drawn, num_chosen: int, normalized: bool, kernels: ExpertKernels, fixed: bool
) -> StackedExperts:
    router = Projection(drawn.router, None)
    return StackedExperts(router, drawn.gate_up, drawn.down, num_chosen, normalized, kernels, fixed)


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_stacked_experts_compute_what_one_after_the_other_do(data: st.DataObject) -> None:
    num_experts = data.draw(st.integers(1, 9))
    num_chosen = data.draw(st.integers(1, min(4, num_experts)))
    normalized = data.draw(st.booleans())
    dtype = data.draw(st.sampled_from(DTYPES))
    drawn = Drawn.of(
        data.draw(st.integers(1, 12)),
        data.draw(st.sampled_from([8, 20, 70])),
        data.draw(st.sampled_from([8, 33])),
        *(num_experts, dtype, data.draw(st.integers(0, 1 << 30))),
    )
    loop = MixtureOfExperts(
        drawn.router,
        tuple(
            GatedMLP(Projection(gate_up, None), Projection(down, None))
            for gate_up, down in zip(drawn.gate_up, drawn.down, strict=True)
        ),
        num_chosen,
        normalized,
    )
    total = torch.randn_like(drawn.rows)
    fixed = data.draw(st.booleans())
    made = [
        stacked(drawn, num_chosen, normalized, kernels, fixed).plus(
            total.clone(), drawn.rows, swiglu
        )
        for kernels in KERNELS
    ]
    assert_close(made[0], made[1])
    # The loop rounds each expert's result and each weight, which in short formats shows.
    if dtype is torch.float32:
        assert_close(made[0], plus_mlp(total, drawn.rows, loop, swiglu))


@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param([[3, 1]] * 70, id="all rows on two experts"),
        pytest.param([[4, 0], [2, 4], [0, 2]], id="some experts without rows"),
        pytest.param([[4, 3]], id="one row"),
        pytest.param([], id="no row"),
    ],
)
def test_products_are_those_of_the_chosen_experts(chosen: list[list[int]], fixed: bool) -> None:
    drawn = Drawn.of(len(chosen), 40, 24, 5, torch.float32, 0)
    numbers = torch.tensor(chosen, dtype=torch.int16).view(-1, 2)
    weights = torch.rand(numbers.shape, generator=torch.Generator().manual_seed(1))
    made = []
    for kernels in KERNELS:
        choices = sort_by_expert(numbers, 5)
        first = kernels.products(drawn.rows, drawn.gate_up, choices, num_chosen=2, fixed=fixed)
        second = kernels.products(
            swiglu(first), drawn.down, choices, num_chosen=2, weights=weights, fixed=fixed
        )
        made.append((first, second))
    assert_close(made[0][0], made[1][0])
    assert_close(made[0][1], made[1][1])
    assert made[0][1].shape == (len(chosen), 2, 40)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_fixed_order_makes_of_a_row_the_same_in_any_company(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    def product(builder: Any, left: Any, right: Any, total: Any, *others: Any) -> Any:
        # numpy's own sums of float32 are in an order that depends on a row's place.
        exact = left.data.astype(np.float64) @ right.data.astype(np.float64)
        return interpreter.TensorHandle(total.data + exact.astype(np.float32), tl.float32)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", product)
    drawn = Drawn.of(70, 40, 24, 3, dtype, 2)
    mixture = stacked(drawn, 2, True, triton_experts, True)
    scores = drawn.rows.float() @ drawn.router.float().T

    class SameScores(Linear):
        """A product of one order is another kernel's promise."""

        size = WeightSize(0, 0)

        def __init__(self, rows: slice) -> None:
            self.rows = rows

        def __call__(self, rows: torch.Tensor) -> torch.Tensor:
            return scores[self.rows].to(dtype)

        def unrounded(self, rows: torch.Tensor) -> torch.Tensor:
            return scores[self.rows]

    def of(part: slice) -> torch.Tensor:
        rows = drawn.rows[part]
        own = mixture._replace(router=SameScores(part))
        return own.plus(torch.zeros_like(rows), rows, swiglu)

    together = of(slice(None))
    for part in (slice(0, 1), slice(69, 70), slice(3, 40)):
        assert torch.equal(of(part), together[part])


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_routes_are_those_of_plain_torch_and_of_equals_the_first(data: st.DataObject) -> None:
    num_experts = data.draw(st.integers(1, 40))
    num_chosen = data.draw(st.integers(1, min(9, num_experts)))
    normalized = data.draw(st.booleans())
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 30)))
    # Few values: equals are common.
    scores = torch.randint(-3, 4, (data.draw(st.integers(0, 5)), num_experts), generator=generator)
    rows = scores.to(data.draw(st.sampled_from(DTYPES)))
    weights, chosen = triton_experts.route(rows, num_chosen, normalized=normalized)
    expected, experts = reference_experts.route(rows, num_chosen, normalized=normalized)
    torch.testing.assert_close(weights, expected)
    assert torch.equal(chosen, experts)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_scores_that_are_no_numbers_stay_in_their_row(broken: float) -> None:
    scores = torch.tensor([[0.0, 1.0, 2.0], [0.0, broken, 1.0], [0.0, -torch.inf, -torch.inf]])
    weights, chosen = triton_experts.route(scores, 2, normalized=True)
    assert weights[0].isfinite().all()
    assert weights[1].isnan().all()
    assert weights[2].tolist() == [1.0, 0.0]
    assert chosen[[0, 2]].tolist() == [[2, 1], [0, 1]]
    assert ((chosen >= 0) & (chosen < 3)).all()


def test_sums_of_choices_are_rounded_once() -> None:
    total = torch.ones(1, 3, dtype=torch.bfloat16)
    results = torch.full((1, 4, 3), 2**-9, dtype=torch.bfloat16)
    for kernels in KERNELS:
        assert kernels.add_choices(total.clone(), results).tolist() == [[1 + 2**-7] * 3]
