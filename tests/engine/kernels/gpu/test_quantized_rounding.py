"""Rounding of rows by kernels, compared with torch."""

from __future__ import annotations

import pytest
import torch

from millrace.engine.kernels.gpu.quantized.rounding import RoundedRows, round_groups, round_rows
from millrace.engine.quantization.weight import Activations, Rounding
from tests.engine.kernels.gpu.closeness import DTYPES

FLOAT8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def _poisoned(poisoned_outputs: None) -> None:
    """Poison outputs, so that unwritten elements show."""


def values(rounded: RoundedRows, group_inputs: int) -> torch.Tensor:
    num_inputs = rounded.codes.shape[1]
    scales = rounded.scales.t().repeat_interleave(group_inputs, 1)[:, :num_inputs]
    return rounded.codes.float() * scales


def drawn(num_rows: int, num_inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """Draw rows of many magnitudes that lie apart, one of them of zeros."""
    memory = torch.full((num_rows, num_inputs + 3), torch.nan, dtype=dtype)
    rows = memory[:, :num_inputs]
    rows.copy_(torch.randn(num_rows, num_inputs) * 10 ** torch.linspace(-3, 2, num_rows)[:, None])
    rows[num_rows // 2] = 0
    return rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_inputs", [1, 48, 200, 5000])
@pytest.mark.parametrize(
    "activations",
    [
        Activations.INT8_TOKEN,
        Activations.INT8_TENSOR,
        Activations.FLOAT8_TOKEN,
        Activations.FLOAT8_TENSOR,
    ],
)
def test_rows_are_rounded_as_torch_rounds_them(
    activations: Activations, num_inputs: int, dtype: torch.dtype
) -> None:
    scale = 0.07 if activations.is_static else None
    is_int8 = activations in (Activations.INT8_TOKEN, Activations.INT8_TENSOR)
    rows = drawn(5, num_inputs, dtype)
    rounded = round_rows(rows, torch.int8 if is_int8 else FLOAT8, scale)
    expected = Rounding(activations, scale, num_inputs)(rows.float())
    assert torch.equal(values(rounded, num_inputs), expected)


@pytest.mark.parametrize("num_inputs", [32, 200, 640])
@pytest.mark.parametrize("group_inputs", [32, 128])
def test_groups_are_rounded_as_torch_rounds_them(num_inputs: int, group_inputs: int) -> None:
    rows = drawn(3, num_inputs, torch.bfloat16)
    expected = Rounding(Activations.FLOAT8_GROUP, None, group_inputs)(rows.float())
    assert torch.equal(values(round_groups(rows, group_inputs), group_inputs), expected)


@pytest.mark.parametrize("dtype", [torch.int8, FLOAT8])
def test_halves_are_rounded_to_even(dtype: torch.dtype) -> None:
    rows = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, 127.0]])
    codes = round_rows(rows, dtype, 1.0).codes.float()
    halves = [0, 2, 2, 0, -2, -2, 126, 127]
    eighths = [0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 128, 128]
    assert codes.tolist() == [halves if dtype is torch.int8 else eighths]


# What numpy says of the NaN that a GPU says nothing of.
@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("scale", [None, 0.1])
@pytest.mark.parametrize("dtype", [torch.int8, FLOAT8])
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_takes_its_row_along_and_no_other(
    broken: float, dtype: torch.dtype, scale: float | None
) -> None:
    rows = torch.randn(3, 300)
    rows[1, 250] = broken
    result = values(round_rows(rows, dtype, scale), 300)
    assert result[1].isnan().all()
    assert result[[0, 2]].isfinite().all()
    groups = values(round_groups(rows, 64), 64)
    assert groups[1, 192:256].isnan().all()
    assert groups[1, :192].isfinite().all()
    assert groups[[0, 2]].isfinite().all()


def test_no_rows_are_none() -> None:
    assert round_rows(torch.empty(0, 32), torch.int8).codes.shape == (0, 32)
    assert round_groups(torch.empty(0, 256), 128).scales.shape == (2, 0)
