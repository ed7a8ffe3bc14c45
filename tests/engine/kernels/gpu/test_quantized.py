"""Products with quantized weights beside float64, of any shape and by each tile."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.engine.kernels.gpu.quantized.packing import PackedWeight, chunk_of
from millrace.engine.kernels.gpu.quantized.product import (
    quantized_linear,
    tiled_quantized_linear,
)
from millrace.engine.kernels.gpu.quantized.rounding import RoundedRows
from millrace.engine.kernels.gpu.quantized.tiles import (
    QuantizedTile,
    RowProductTile,
    fixed_quantized_tile,
    quantized_expert_tile,
    quantized_tile,
    row_product_tile,
)
from millrace.engine.quantization.device_linear import packed
from millrace.engine.quantization.weight import Activations
from tests.engine.kernels.gpu.closeness import DTYPES
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


def drawn(num_rows: int, width: int, gap: int, dtype: torch.dtype) -> torch.Tensor:
    """Draw random rows that lie ``gap`` elements of poison apart."""
    memory = torch.full((num_rows, width + gap), torch.nan, dtype=dtype)
    memory[:, :width] = torch.randn(num_rows, width)
    return memory[:, :width]


@settings(deadline=None, max_examples=30)
@given(
    kind=st.sampled_from(KINDS),
    num_rows=st.sampled_from([0, 1, 1, 2, 5, 16, 17, 40]),
    num_outputs=st.sampled_from([1, 16, 24, 33]),
    inputs=st.sampled_from([(64, 64), (256, 64), (256, 128), (384, 384), (704, 128), (320, 256)]),
    dtype=st.sampled_from(DTYPES),
    biased=st.booleans(),
    added=st.booleans(),
    fixed=st.booleans(),
    gap=st.sampled_from([0, 3]),
    seed=st.integers(0, 1 << 30),
)
def test_products_are_those_of_the_values(
    kind: Kind,
    num_rows: int,
    num_outputs: int,
    inputs: tuple[int, int],
    dtype: torch.dtype,
    biased: bool,
    added: bool,
    fixed: bool,
    gap: int,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    weight = drawn_weight(kind, num_outputs, *inputs)
    rows = drawn(num_rows, inputs[0], gap, dtype)
    expected = exact(rows, weight)
    bias = torch.randn(num_outputs).to(dtype) if biased else None
    residual = drawn(num_rows, num_outputs, gap, dtype) if added else None
    if bias is not None:
        expected += bias.double()
    if residual is not None:
        expected += residual.double()
    result = quantized_linear(
        as_multiplied(rows, weight),
        packed(weight),
        bias,
        residual=residual,
        dtype=dtype,
        fixed=fixed,
    )
    assert result.dtype is dtype
    assert_near(result, expected)


@pytest.mark.parametrize("group_inputs", [32, 96, 192])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_groups_of_a_width_that_few_chunks_divide(num_rows: int, group_inputs: int) -> None:
    """The last group of 192 is shorter."""
    weight = drawn_weight(Kind(4, Activations.WIDE, zeroed=True), 20, 288, group_inputs)
    rows = torch.randn(num_rows, 288)
    assert packed(weight).chunk == 32
    result = quantized_linear(rows, packed(weight), dtype=torch.float32)
    assert_near(result, exact(rows, weight))


def test_chunks() -> None:
    assert chunk_of(4096, 128, 4) == 128
    assert chunk_of(4096, 0, 8) == 128
    assert chunk_of(4096, 32, 4) == 32
    assert chunk_of(48, 0, 8) == 16
    assert chunk_of(48, 0, 4) == 0
    assert chunk_of(40, 0, 8) == 0
    weight = drawn_weight(Kind(8, Activations.WIDE), 3, 40, 40)
    with pytest.raises(ValueError, match="40 inputs in groups of 0 have no chunks"):
        packed(weight)


def test_scales_are_kept_in_as_few_bytes_as_hold_them() -> None:
    scales = torch.rand(3, 2)
    codes = torch.zeros(3, 64, dtype=torch.int8)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        given_scales = scales.to(dtype).float()
        made = PackedWeight.of(codes, given_scales, group_inputs=32, bits=4)
        assert made.scales.dtype is dtype
        assert torch.equal(made.scales.float().t(), given_scales)
    assert made.size.num_bytes == 3 * 32 + 6 * 4
    assert (made.num_inputs, made.num_outputs) == (64, 3)


SHAPES = [(1, 512), (1, 4096), (1, 16384), (9, 512), (9, 4096), (9, 16384)]
SHAPES += [(20, 512), (64, 512), (65, 512), (600, 512)]


@pytest.mark.parametrize(("num_rows", "num_outputs"), SHAPES)
@pytest.mark.parametrize(
    "kind",
    [Kind(4, Activations.WIDE, zeroed=True), Kind(8, Activations.INT8_TOKEN)],
    ids=["int4", "int8"],
)
def test_each_tile(kind: Kind, num_rows: int, num_outputs: int) -> None:
    """Tiles of large products are tried on small products."""
    dtype = torch.bfloat16
    tile: RowProductTile | QuantizedTile
    if num_rows == 1:
        tile = row_product_tile(num_outputs, 64 if kind.bits == 4 else 128)
    else:
        tile = quantized_tile(num_rows, num_outputs, 2 if kind.bits == 4 else 1)
        num_rows = min(num_rows, tile.rows + 3)
    weight = drawn_weight(kind, tile.outputs + 5, 384, 128)
    rows = torch.randn(num_rows, 384).to(dtype)
    operand = as_multiplied(rows, weight)
    result = tiled_quantized_linear(operand, packed(weight), None, None, dtype, tile)
    assert_near(result, exact(rows, weight))


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[7], KINDS[12]], ids=["int4", "int8", "float8"])
def test_fixed_products_of_a_row_do_not_depend_on_others(kind: Kind) -> None:
    """Rows keep their places in a tile, as numpy, which multiplies tiles here, looks at these."""
    torch.manual_seed(1)
    dtype = torch.bfloat16
    weight = drawn_weight(kind, 70, 256, 128)
    made = packed(weight)
    rows = torch.randn(70, 256).to(dtype)
    together = quantized_linear(as_multiplied(rows, weight), made, dtype=dtype, fixed=True)
    for count in (1, 17, 69):
        operand = as_multiplied(rows[:count], weight)
        part = quantized_linear(operand, made, dtype=dtype, fixed=True)
        assert torch.equal(part, together[:count])


# What numpy says of the NaN that a GPU says nothing of.
@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("num_rows", [1, 3])
def test_what_is_not_finite_stays_in_its_row(num_rows: int, kind: Kind) -> None:
    weight = drawn_weight(kind, 20, 256, 128)
    rows = torch.randn(num_rows, 256)
    rows[0, 7] = torch.nan
    result = quantized_linear(as_multiplied(rows, weight), packed(weight), dtype=torch.float32)
    assert result[0].isnan().all()
    assert result[1:].isfinite().all()


def test_int8_is_summed_exactly() -> None:
    """The largest products of a wide row, which float32 would round on the way."""
    weight = drawn_weight(Kind(8, Activations.INT8_TOKEN), 16, 16384, 16384)
    weight.codes.fill_(-128)
    weight.codes[:, ::2] = 127
    weight.scales.fill_(1.0)
    codes = torch.full((2, 16384), 127, dtype=torch.int8)
    codes[1, 5:] = -127
    operand = RoundedRows(codes, torch.ones(1, 2))
    result = quantized_linear(operand, packed(weight), dtype=torch.float32)
    assert torch.equal(result, (codes.double() @ weight.values(torch.float64).t()).float())


@pytest.mark.parametrize("row_bytes", [1, 2, 4])
def test_tiles_are_what_a_processor_takes(row_bytes: int) -> None:
    tiles = [
        quantized_tile(num_rows, num_outputs, row_bytes)
        for num_rows in (2, 16, 17, 64, 65, 4096)
        for num_outputs in (256, 4096, 128256)
    ]
    tiles += [quantized_expert_tile(n, 8, row_bytes, fixed=False) for n in (8, 400, 4000)]
    for tile in (*tiles, fixed_quantized_tile(row_bytes)):
        assert tile.rows >= 16
        stage_bytes = 128 * (tile.rows * row_bytes + tile.outputs)
        assert stage_bytes * tile.num_stages <= 227 << 10
