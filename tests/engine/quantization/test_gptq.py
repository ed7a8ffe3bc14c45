"""GPTQ, compared with rounding to nearest and with a plain implementation."""

from __future__ import annotations

import pytest
import torch

from millrace.engine.quantization.rounding import int4_scales, rounded_int4
from millrace.engine.quantization.weight import QuantizedWeight
from millrace.engine.quantizer.gptq import gptq_int4


def correlated(num_rows: int, num_inputs: int, rank: int = 12) -> torch.Tensor:
    """Draw inputs that mostly lie in a few directions, some of them far larger than others."""
    generator = torch.Generator().manual_seed(3)
    directions = torch.randn(rank, num_inputs, generator=generator)
    strengths = torch.randn(num_rows, rank, generator=generator) * torch.logspace(1, -1, rank)
    return strengths @ directions + 0.1 * torch.randn(num_rows, num_inputs, generator=generator)


def drawn(num_outputs: int, num_inputs: int) -> torch.Tensor:
    return torch.randn(num_outputs, num_inputs, generator=torch.Generator().manual_seed(4))


def output_error(made: QuantizedWeight, weight: torch.Tensor, rows: torch.Tensor) -> float:
    return float(((made.values() - weight) @ rows.t()).norm() / (weight @ rows.t()).norm())


@pytest.mark.parametrize("num_inputs", [256, 160, 48])
def test_gptq_is_far_better_than_rounding_for_correlated_inputs(
    num_inputs: int,
) -> None:
    weight, rows = drawn(32, num_inputs), correlated(2048, num_inputs)
    held_out = correlated(4096, num_inputs)[2048:]
    plain = rounded_int4(weight)
    made = gptq_int4(weight, rows.t() @ rows)
    assert (made.bits, made.group_inputs) == (4, plain.group_inputs)
    assert made.scales.shape == plain.scales.shape
    assert (int(made.codes.min()), int(made.codes.max())) == (-8, 7)
    for inputs in (rows, held_out):
        assert output_error(made, weight, inputs) < 0.5 * output_error(plain, weight, inputs)


def plainly(weight: torch.Tensor, hessian: torch.Tensor, size: int) -> torch.Tensor:
    """Compute the values by Frantar et al., equations 2 and 3, in float64.

    One input after the other is rounded, and the others compensate by the inverse of the remaining
    matrix.
    """
    num_inputs = weight.shape[1]
    diagonal = hessian.diagonal()
    damping = 0.01 * diagonal.mean()
    importance = (diagonal + damping).reshape(-1, size)
    groups = weight.reshape(len(weight), -1, size)
    scales = int4_scales(groups, importance=importance)[0].squeeze(-1).double()
    order = diagonal.argsort(descending=True, stable=True).tolist()
    rest, values = weight.double(), torch.zeros_like(weight)
    matrix = hessian.double() + damping.double() * torch.eye(num_inputs, dtype=torch.float64)
    for place, column in enumerate(order):
        left = order[place:]
        inverse = torch.linalg.inv(matrix[left][:, left])
        scale = scales[:, column // size]
        value = (rest[:, column] / scale).round().clamp(-8, 7) * scale
        values[:, column] = value.float()
        error = (rest[:, column] - value) / inverse[0, 0]
        rest[:, left] -= error[:, None] * inverse[0]
    return values


def test_gptq_gives_the_values_of_the_paper() -> None:
    """The weight has several blocks and groups. A tie that falls otherwise in float32 moves later
    values, so that not every last value is the same."""
    weight, rows = drawn(6, 192), correlated(1024, 192)
    hessian = rows.t() @ rows
    expected = plainly(weight, hessian, 64)
    made = gptq_int4(weight, hessian, group_inputs=64).values()
    same = torch.isclose(made, expected, rtol=1e-4, atol=1e-5)
    assert same.float().mean() > 0.98


def test_inputs_that_were_never_seen_are_rounded_to_nearest() -> None:
    weight = drawn(8, 128)
    nothing = gptq_int4(weight, torch.zeros(128, 128))
    assert torch.equal(nothing.values(), rounded_int4(weight).values())
    rows = correlated(512, 128)
    rows[:, 64:] = 0
    half = gptq_int4(weight, rows.t() @ rows)
    step = half.scales.max()
    assert ((half.values() - weight)[:, 64:].abs() <= step * 4).all()
    assert torch.isfinite(half.values()).all()


def test_a_singular_matrix_is_damped() -> None:
    row = correlated(1, 64)
    made = gptq_int4(drawn(8, 64), row.t() @ row * 1e12)
    assert torch.isfinite(made.values()).all()


def test_scales_are_as_they_will_be_stored() -> None:
    rows = correlated(512, 128)
    made = gptq_int4(drawn(8, 128), rows.t() @ rows, scale_dtype=torch.bfloat16)
    assert torch.equal(made.scales.bfloat16().float(), made.scales)
