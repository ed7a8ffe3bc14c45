"""Norms and gates beside their references, for any width."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.engine.kernels.gpu import rows as kernels
from millrace.engine.kernels.gpu.reference import operations as reference
from millrace.engine.kernels.gpu.tiles import norm_tile
from tests.engine.kernels.gpu.closeness import DTYPES, assert_close

EPSILON = 1e-6
SHAPES = {
    "num_rows": st.integers(0, 4),
    "width": st.sampled_from([1, 8, 40, 96, 127, 1024, 1025, 3072, 4100]),
    "gap": st.sampled_from([0, 8, 5]),
    "dtype": st.sampled_from(DTYPES),
    "seed": st.integers(0, 1 << 30),
}


@pytest.fixture(autouse=True)
def _poisoned(poisoned_outputs: None) -> None:
    """Poison outputs, so that unwritten elements show."""


def drawn(num_rows: int, width: int, gap: int, dtype: torch.dtype) -> torch.Tensor:
    """Draw random rows that lie ``gap`` elements of poison apart."""
    memory = torch.full((num_rows, width + gap), torch.nan, dtype=dtype)
    memory[:, :width] = torch.randn(num_rows, width) * 3
    return memory[:, :width]


@settings(deadline=None, max_examples=40)
@given(**SHAPES)
def test_rms_norm(num_rows: int, width: int, gap: int, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    rows, weight = drawn(num_rows, width, gap, dtype), torch.randn(width).to(dtype)
    expected = reference.rms_norm(rows, weight, EPSILON)
    assert_close(kernels.rms_norm(rows, weight, EPSILON), expected)
    exact = rows.double() / (rows.double().square().mean(-1, keepdim=True) + EPSILON).sqrt()
    assert_close(expected, (exact * weight.double()).to(dtype))


@settings(deadline=None, max_examples=40)
@given(**SHAPES)
def test_add_rms_norm(num_rows: int, width: int, gap: int, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    total, delta = drawn(num_rows, width, gap, dtype), drawn(num_rows, width, 0, dtype)
    weight = torch.randn(width).to(dtype)
    expected_total = total.clone()
    expected = reference.add_rms_norm(expected_total, delta, weight, EPSILON)
    assert_close(kernels.add_rms_norm(total, delta, weight, EPSILON), expected)
    assert torch.equal(total, expected_total)


@settings(deadline=None, max_examples=40)
@given(**SHAPES)
def test_swiglu(num_rows: int, width: int, gap: int, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    gate_up = drawn(num_rows, 2 * width, gap, dtype)
    gate_up[:, 0] = -120.0  # whose exponential is no float32
    expected = reference.swiglu(gate_up)
    assert_close(kernels.swiglu(gate_up), expected)
    gate, up = gate_up.double().chunk(2, -1)
    assert_close(expected, (torch.nn.functional.silu(gate) * up).to(dtype))


def test_what_is_not_finite_stays_in_its_row() -> None:
    rows = torch.randn(3, 24)
    rows[1, 5] = torch.nan
    normed = kernels.rms_norm(rows, torch.ones(24), EPSILON)
    assert normed[[0, 2]].isfinite().all()
    assert normed[1].isnan().all()
    assert kernels.swiglu(rows).isnan().sum() == 1


@pytest.mark.parametrize("width", [1, 2, 64, 100, 128, 129, 896, 1024, 2560, 4096, 8192])
def test_no_element_of_a_sum_in_place_has_two_threads(width: int) -> None:
    tile = norm_tile(width)
    assert tile.block >= width
    assert tile.block >= 32 * tile.num_warps
