"""Products of rows and weights beside float64, for any shape and by each tile."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.engine.kernels.gpu.matmul import gated_linear, linear, tiled_linear
from millrace.engine.kernels.gpu.reference.operations import gated_linear as reference_gated_linear
from millrace.engine.kernels.gpu.reference.operations import linear as reference_linear
from millrace.engine.kernels.gpu.tiles import fixed_product_tile, gated_product_tile, product_tile
from tests.engine.kernels.gpu.closeness import DTYPES, assert_close


@pytest.fixture(autouse=True)
def _poisoned(poisoned_outputs: None) -> None:
    """Poison outputs, so that unwritten elements show."""


def exact(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    result = rows.double() @ weight.double().t()
    if bias is not None:
        result += bias.double()
    if residual is not None:
        result += residual.double()
    return result.to(rows.dtype)


def drawn(num_rows: int, width: int, gap: int, dtype: torch.dtype) -> torch.Tensor:
    """Draw random rows that lie ``gap`` elements of poison apart."""
    memory = torch.full((num_rows, width + gap), torch.nan, dtype=dtype)
    memory[:, :width] = torch.randn(num_rows, width)
    return memory[:, :width]


@settings(deadline=None, max_examples=20)
@given(
    num_rows=st.sampled_from([0, 1, 1, 2, 5, 16, 17, 40]),
    num_outputs=st.sampled_from([1, 16, 24, 33, 96]),
    num_inputs=st.sampled_from([1, 16, 40, 127, 256, 528]),
    dtype=st.sampled_from(DTYPES),
    biased=st.booleans(),
    added=st.booleans(),
    fixed=st.booleans(),
    gap=st.sampled_from([0, 16, 3]),
    seed=st.integers(0, 1 << 30),
)
def test_any_shape(
    num_rows: int,
    num_outputs: int,
    num_inputs: int,
    dtype: torch.dtype,
    biased: bool,
    added: bool,
    fixed: bool,
    gap: int,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    rows = drawn(num_rows, num_inputs, gap, dtype)
    weight = drawn(num_outputs, num_inputs, gap, dtype) * num_inputs**-0.5
    bias = torch.randn(num_outputs).to(dtype) if biased else None
    residual = drawn(num_rows, num_outputs, gap, dtype) if added else None
    expected = exact(rows, weight, bias, residual)
    for function in (linear, reference_linear):
        result = function(rows, weight, bias, residual=residual, fixed=fixed)
        assert result.dtype is dtype
        assert_close(result, expected)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("num_rows", [1, 5, 40])
def test_float32_results_of_narrow_rows_are_not_rounded(num_rows: int, fixed: bool) -> None:
    torch.manual_seed(num_rows)
    rows, weight = torch.randn(num_rows, 256).half(), torch.randn(48, 256).half()
    bias = torch.randn(48).half()
    expected = rows.double() @ weight.double().t() + bias.double()
    for function in (linear, reference_linear):
        result = function(rows, weight, bias, fixed=fixed, dtype=torch.float32)
        assert result.dtype is torch.float32
        assert (result - expected).abs().max() < 1e-5 * expected.abs().max()


SHAPES = [(1, 512), (1, 4096), (1, 16384), (9, 512), (9, 4096), (9, 16384), (40, 64), (600, 64)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "num_outputs"), SHAPES)
def test_each_tile(num_rows: int, num_outputs: int, dtype: torch.dtype) -> None:
    """Tiles of large products are tried on small products."""
    tile = product_tile(num_rows, num_outputs, 4096, dtype.itemsize)
    num_rows, num_outputs = min(num_rows, 2 * tile.rows + 3), tile.outputs + 5
    if tile.rows == 1:
        num_rows = 1
    rows = torch.randn(num_rows, 2 * tile.inputs + 16).to(dtype)
    weight = (torch.randn(num_outputs, rows.shape[1]) * 0.05).to(dtype)
    expected = exact(rows, weight, None, None)
    assert_close(tiled_linear(rows, weight, None, None, tile), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_inputs", [72, 256])
def test_fixed_products_of_a_row_do_not_depend_on_others(
    num_inputs: int, dtype: torch.dtype
) -> None:
    """Rows keep their places in a tile, as numpy, which multiplies tiles here, looks at these."""
    torch.manual_seed(num_inputs)
    rows, weight = torch.randn(70, num_inputs).to(dtype), torch.randn(70, num_inputs).to(dtype)
    together, referred = (
        linear(rows, weight, fixed=True),
        reference_linear(rows, weight, fixed=True),
    )
    for count in (1, 2, 16, 17, 33, 69):
        assert torch.equal(linear(rows[:count], weight, fixed=True), together[:count])
        some = torch.randperm(70)[:count]
        assert torch.equal(reference_linear(rows[some], weight, fixed=True), referred[some])


@settings(deadline=None, max_examples=15)
@given(
    num_rows=st.sampled_from([0, 1, 1, 2, 16, 17, 66]),
    width=st.sampled_from([1, 16, 33, 96]),
    num_inputs=st.sampled_from([16, 40, 127, 528]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1 << 30),
)
def test_gated_products(
    num_rows: int, width: int, num_inputs: int, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    rows = drawn(num_rows, num_inputs, 0, dtype)
    weight = drawn(2 * width, num_inputs, 3, dtype) * num_inputs**-0.5
    gate, up = (rows.double() @ weight.double().t()).chunk(2, -1)
    expected = (torch.nn.functional.silu(gate) * up).to(dtype)
    for function in (gated_linear, reference_gated_linear):
        assert_close(function(rows, weight), expected)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_what_is_not_finite_stays_in_its_row(num_rows: int) -> None:
    rows = torch.randn(num_rows, 64)
    rows[0, 7] = torch.nan
    result = linear(rows, torch.randn(20, 64))
    assert result[0].isnan().all()
    assert result[1:].isfinite().all()


@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("num_inputs", [1000, 4096])
def test_tiles_are_what_a_processor_takes(num_inputs: int, element_bytes: int) -> None:
    tiles = [
        choose(num_rows, num_outputs, num_inputs, element_bytes)
        for choose in (product_tile, gated_product_tile)
        for num_rows in (1, 2, 16, 17, 64, 65, 4096)
        for num_outputs in (256, 1024, 4096, 28672, 128256)
    ]
    for tile in (*tiles, fixed_product_tile(num_inputs, element_bytes)):
        assert tile.rows == 1 or tile.rows >= 16
        stage_bytes = (tile.rows + tile.outputs) * tile.inputs * element_bytes
        assert stage_bytes * tile.num_stages <= 227 << 10
