"""Quantized experts in a stack, compared with experts widened by torch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from millrace.engine.kernels.gpu import experts as triton_experts
from millrace.engine.kernels.gpu.quantized.experts import quantized_products
from millrace.engine.kernels.gpu.quantized.packing import PackedWeight
from millrace.engine.kernels.gpu.reference import experts as reference_experts
from millrace.engine.kernels.gpu.sorted_choices import sort_by_expert
from millrace.engine.models.linears import Projection
from millrace.engine.models.stacked_experts import StackedExperts
from millrace.engine.quantization.device_experts import (
    QuantizedStack,
    RoundedStack,
    quantized_stacks,
)
from millrace.engine.quantization.device_linear import packed
from millrace.engine.quantization.weight import Activations, QuantizedWeight
from millrace.schemas.errors import CheckpointError
from tests.engine.kernels.gpu.quantized_cases import (
    KINDS,
    Kind,
    as_multiplied,
    assert_near,
    drawn_weight,
    exact,
)


@pytest.fixture(autouse=True)
def _poisoned(poisoned_outputs: None) -> None:
    """Poison outputs, so that unwritten elements show."""


def stack(weights: list[QuantizedWeight]) -> PackedWeight:
    return PackedWeight.stacked([packed(weight) for weight in weights])


def check(kind: Kind, chosen: list[list[int]], *, dtype: torch.dtype, fixed: bool) -> None:
    """Check both products of 5 experts with an odd number of outputs; a row chooses two experts."""
    torch.manual_seed(3)
    numbers = torch.tensor(chosen, dtype=torch.int16).view(-1, 2)
    weights = torch.rand(numbers.shape)
    experts = [drawn_weight(kind, 21, 256, 128) for _ in range(5)]
    choices = sort_by_expert(numbers, 5)
    assert len(stack(experts)) == 5

    rows = torch.randn(len(chosen), 256).to(dtype)
    operand = as_multiplied(rows, experts[0])
    first = quantized_products(
        operand, stack(experts), choices, num_chosen=2, dtype=dtype, fixed=fixed
    )
    expected = torch.stack([exact(rows, expert) for expert in experts])
    places = choices.order
    assert_near(first, expected[numbers.flatten().long()[places], places // 2])

    inner = torch.randn(2 * len(chosen), 256).to(dtype)
    operand = as_multiplied(inner, experts[0])
    second = quantized_products(
        operand, stack(experts), choices, num_chosen=2, weights=weights, dtype=dtype, fixed=fixed
    )
    assert second.shape == (len(chosen), 2, 21)
    expected = torch.stack([exact(inner, expert) for expert in experts])
    back = torch.empty_like(places)
    back[places] = torch.arange(len(places))
    wanted = expected[numbers.flatten().long(), back] * weights.double().view(-1, 1)
    assert_near(second.flatten(0, 1), wanted)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_products_are_those_of_the_chosen_experts(kind: Kind) -> None:
    check(kind, [[4, 0], [2, 4], [0, 2]], dtype=torch.bfloat16, fixed=False)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("kind", [KINDS[1], KINDS[12]], ids=str)
@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param([[3, 1]] * 70, id="all rows on two experts"),
        pytest.param([[4, 3]], id="one row"),
        pytest.param([], id="no row"),
    ],
)
def test_crowded_and_empty_experts(kind: Kind, chosen: list[list[int]], fixed: bool) -> None:
    check(kind, chosen, dtype=torch.float32, fixed=fixed)


def test_a_stack_keeps_what_any_expert_has() -> None:
    """Zeros belong to some experts only, and so do scales in 16 bits."""
    plain = drawn_weight(KINDS[0], 21, 256, 128)
    plain.scales.fill_(0.5)
    zeroed = drawn_weight(KINDS[1], 21, 256, 128)
    made = stack([plain, zeroed])
    assert made.scales.dtype is torch.float32
    assert made.zeros is not None
    assert not made.zeros[0].any()
    for number, weight in enumerate((plain, zeroed)):
        assert torch.equal(made.scales[number].t(), weight.scales)
    assert stack([plain, plain]).scales.dtype is torch.bfloat16


@pytest.mark.parametrize(
    "other",
    [
        drawn_weight(KINDS[0], 22, 256, 128),
        drawn_weight(KINDS[0], 21, 256, 64),
        drawn_weight(KINDS[5], 21, 256, 128),
    ],
)
def test_experts_of_several_layouts_are_no_stack(other: QuantizedWeight) -> None:
    with pytest.raises(ValueError, match="differ in their layout"):
        stack([drawn_weight(KINDS[0], 21, 256, 128), other])


def mixtures(
    weights: Sequence[QuantizedWeight], downs: Sequence[QuantizedWeight], *, fixed: bool
) -> list[StackedExperts]:
    """Return two mixtures: by the kernels of quantized weights, and by torch's kernels of wide
    weights."""
    router = Projection(torch.randn(len(weights), 64), None)
    made = []
    for kernels in (triton_experts, reference_experts):
        make = quantized_stacks(kernels, torch.float32, has_kernels=kernels is triton_experts)
        made.append(StackedExperts(router, make(weights), make(downs), 2, True, kernels, fixed))
    return made


def swiglu(rows: torch.Tensor) -> torch.Tensor:
    gate, up = rows.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("kind", [KINDS[1], KINDS[7], KINDS[12]], ids=str)
def test_a_mixture_is_that_of_its_values(kind: Kind, fixed: bool) -> None:
    torch.manual_seed(5)
    weights = [drawn_weight(kind, 256, 64, 32 if kind.bits == 4 else 64) for _ in range(3)]
    downs = [drawn_weight(kind, 64, 128, 128) for _ in range(3)]
    ours, expected = mixtures(weights, downs, fixed=fixed)
    assert isinstance(ours.gate_up, QuantizedStack)
    assert isinstance(expected.gate_up, torch.Tensor | RoundedStack)
    assert len(ours.gate_up) == len(expected.gate_up) == 3
    rows, total = torch.randn(4, 64), torch.randn(4, 64)
    result = ours.plus(total.clone(), rows, swiglu)
    wanted = expected.plus(total.clone(), rows, swiglu)
    # Between the products, rows that differ in their last bits may be rounded apart.
    assert (result - wanted).norm() <= 1e-2 * (wanted - total).norm()


@pytest.mark.parametrize(
    ("reason", "experts"),
    [
        (
            "an order of its own",
            [drawn_weight(KINDS[0], 8, 64, 32, ordered=True) for _ in range(2)],
        ),
        ("in several ways", [drawn_weight(kind, 8, 64, 32) for kind in (KINDS[0], KINDS[5])]),
        ("72 inputs", [drawn_weight(KINDS[7], 8, 72, 72)]),
    ],
)
def test_experts_that_no_kernel_takes_are_widened(
    reason: str, experts: list[QuantizedWeight], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        stack = quantized_stacks(triton_experts, torch.float32, has_kernels=True)(experts)
    assert reason in caplog.text
    rows = torch.randn(1, experts[0].num_inputs)
    choices = sort_by_expert(torch.zeros(1, 1, dtype=torch.int16), len(experts))
    if isinstance(stack, RoundedStack):
        result = stack.products(rows, choices, num_chosen=1, weights=None, fixed=False)
        below = stack.products(rows, choices, num_chosen=1, weights=torch.ones(1, 1), fixed=False)
        assert torch.equal(below[0], result)
    else:
        assert isinstance(stack, torch.Tensor)
        result = triton_experts.products(rows, stack, choices, num_chosen=1)
    assert_near(result, exact(rows, experts[0]))


def test_experts_that_round_by_several_constants_are_refused() -> None:
    one = drawn_weight(Kind(8, Activations.INT8_TENSOR), 8, 64, 64)
    other = replace(one, activation_scale=0.03)
    make = quantized_stacks(triton_experts, torch.float32, has_kernels=True)
    with pytest.raises(CheckpointError, match=r"several constants \(int8_tensor\)"):
        make([one, other])
