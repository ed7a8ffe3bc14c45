"""Compiled products with quantized weights, compared with float64, on the CPU's own instructions
and without some of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.engine.kernels.cpu import CpuProducts
from millrace.engine.models.linears import PackedProjection, packed_quantized
from millrace.engine.quantization.linear import DequantizedLinear
from millrace.engine.quantization.weight import Activations, QuantizedWeight
from tests.engine.kernels.compiled import BUILDS, compiled_products
from tests.engine.quantization.drawn import (
    FLOAT8_ROWS,
    INT8_ROWS,
    exact_product,
    in_half,
    random_weight,
)

_MOST_ERROR = 1e-2
_KINDS: list[tuple[bool, int, Activations]] = [
    *((False, bits, kind) for bits in (4, 8) for kind in (Activations.WIDE, *INT8_ROWS)),
    *((True, 8, kind) for kind in (Activations.WIDE, *FLOAT8_ROWS)),
    *((False, bits, Activations.INT16_GROUP) for bits in (4, 5, 6, 8)),
]


def _fitting(num_groups: int, group_inputs: int, activations: Activations) -> tuple[int, int]:
    """Return a number of groups and their size that the rounding of rows supports."""
    if activations is not Activations.INT16_GROUP:
        return num_groups, group_inputs
    return (2 * num_groups, 16) if group_inputs == 16 else (num_groups * group_inputs // 32, 32)


@pytest.fixture(scope="module", params=BUILDS, ids=lambda flags: " ".join(flags) or "native")
def kernels(request: pytest.FixtureRequest) -> CpuProducts:
    return compiled_products(request.param)


def _relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    if not expected.numel():
        return 0.0
    return float((result.double() - expected).abs().max() / expected.abs().max())


@settings(max_examples=80, deadline=None)
@given(
    kind=st.sampled_from(_KINDS),
    num_rows=st.integers(0, 30) | st.sampled_from([48, 97]),
    groups=st.tuples(st.integers(1, 4), st.sampled_from([16, 32, 128])),
    num_outputs=st.integers(1, 100),
    has_zeros=st.booleans(),
    has_order=st.booleans(),
    has_bias=st.booleans(),
    has_offsets=st.booleans(),
    is_signed=st.booleans(),
    seed=st.integers(0, 2**30),
)
def test_a_product_is_that_of_the_values(
    kernels: CpuProducts,
    kind: tuple[bool, int, Activations],
    num_rows: int,
    groups: tuple[int, int],
    num_outputs: int,
    has_zeros: bool,
    has_order: bool,
    has_bias: bool,
    has_offsets: bool,
    is_signed: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    is_float, bits, activations = kind
    is_int16 = activations is Activations.INT16_GROUP
    weight = random_weight(
        num_outputs,
        *_fitting(*groups, activations),
        is_float=is_float,
        bits=bits,
        has_zeros=has_zeros and not is_float and not is_int16,
        has_offsets=has_offsets and is_int16,
        is_signed=is_signed or not (has_offsets and is_int16) or bits == 8,
        has_order=has_order and activations is not Activations.FLOAT8_GROUP,
        activations=activations,
    )
    rows = torch.randn(num_rows, weight.num_inputs).bfloat16()
    bias = torch.randn(num_outputs).bfloat16() if has_bias else None
    expected = exact_product(weight, rows)
    if bias is not None:
        expected += bias.double()
    linear = packed_quantized(kernels, weight, bias)
    assert isinstance(linear, PackedProjection)
    assert _relative_error(linear(rows), expected) <= _MOST_ERROR
    total = torch.randn(num_rows, num_outputs).bfloat16()
    assert _relative_error(linear.plus(total.clone(), rows), expected + total) <= _MOST_ERROR
    wide_bias = None if bias is None else bias.float()
    by_torch = DequantizedLinear(weight, wide_bias, torch.float32)(rows.float())
    assert _relative_error(by_torch, expected) <= 1e-4


@pytest.mark.parametrize(("is_float", "bits", "activations"), _KINDS)
def test_a_row_is_the_same_in_every_company_and_by_any_number_of_threads(
    kernels: CpuProducts, is_float: bool, bits: int, activations: Activations
) -> None:
    torch.manual_seed(5)
    weight = random_weight(
        200,
        *_fitting(2, 128, activations),
        is_float=is_float,
        bits=bits,
        has_order=True,
        has_offsets=activations is Activations.INT16_GROUP,
        activations=activations,
    )
    linear = packed_quantized(kernels, weight, None)
    rows = torch.randn(64, 256).bfloat16()
    alone = torch.cat([linear(row[None]) for row in rows])
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 5):
            torch.set_num_threads(num_threads)
            for end in (2, 12, 13, 31, 64):
                assert torch.equal(linear(rows[:end]), alone[:end])
    finally:
        torch.set_num_threads(before)


def _swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.float().chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


@pytest.mark.parametrize("width", [16, 20, 48])
@pytest.mark.parametrize("activations", [Activations.INT8_TOKEN, Activations.INT16_GROUP])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_gated_product_is_swiglu_of_it(
    kernels: CpuProducts, width: int, bits: int, activations: Activations
) -> None:
    torch.manual_seed(width)
    weight = random_weight(2 * width, 2, 32, bits=bits, activations=activations)
    rows = torch.randn(13, 64).bfloat16() / 8
    gated = packed_quantized(kernels, weight, None).gated(rows, _swiglu)
    assert _relative_error(gated, _swiglu(exact_product(weight, rows))) <= _MOST_ERROR


@pytest.mark.parametrize(("is_float", "bits", "activations"), _KINDS)
def test_what_is_not_finite_stays_in_its_row(
    kernels: CpuProducts, is_float: bool, bits: int, activations: Activations
) -> None:
    torch.manual_seed(3)
    groups = _fitting(1, 64, activations)
    weight = random_weight(40, *groups, is_float=is_float, bits=bits, activations=activations)
    rows = torch.randn(14, 64).bfloat16()
    rows[3, 9] = float("nan")
    result = packed_quantized(kernels, weight, None)(rows)
    assert not result[3].isfinite().any()
    assert result[[0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]].isfinite().all()


def test_offsets_of_full_precision_are_kept(kernels: CpuProducts) -> None:
    torch.manual_seed(2)
    drawn = random_weight(
        24, 4, 32, bits=4, has_offsets=True, is_signed=False, activations=Activations.INT16_GROUP
    )
    # One input per group, so that each result is a single value of the weight.
    rows = torch.zeros(4, 128).bfloat16()
    rows[torch.arange(4), torch.arange(4) * 32 + 7] = 1.0
    for weight in (drawn, in_half(drawn)):
        result = packed_quantized(kernels, weight, None)(rows)
        expected = weight.values()[:, 7::32].T
        assert _relative_error(result, expected.bfloat16().double()) <= 2**-8


@pytest.mark.parametrize("change", [{"group_inputs": 48}, {"zeros": torch.ones(24, 2).short()}])
def test_groups_that_no_product_reads_are_computed_by_torch(
    kernels: CpuProducts, change: dict[str, Any]
) -> None:
    torch.manual_seed(1)
    weight = random_weight(24, 2, 48, has_offsets=True, activations=Activations.INT16_GROUP)
    rows = torch.randn(5, 96).bfloat16()
    linear = packed_quantized(kernels, replace(weight, **change), None)
    assert isinstance(linear, DequantizedLinear)
    expected = exact_product(replace(weight, **change), rows)
    assert _relative_error(linear(rows), expected) <= _MOST_ERROR


@pytest.mark.parametrize(("num_inputs", "group_inputs"), [(40, 40), (96, 24), (160, 128)])
def test_widths_that_no_product_reads_are_computed_by_torch(
    kernels: CpuProducts, num_inputs: int, group_inputs: int
) -> None:
    torch.manual_seed(1)
    num_groups = -(-num_inputs // group_inputs)
    weight = QuantizedWeight(
        torch.randint(-128, 128, (24, num_inputs), dtype=torch.int8),
        torch.rand(24, num_groups) / 128,
        group_inputs,
    )
    rows = torch.randn(5, num_inputs).bfloat16()
    linear = packed_quantized(kernels, weight, None)
    assert isinstance(linear, DequantizedLinear)
    assert _relative_error(linear(rows), exact_product(weight, rows)) <= _MOST_ERROR
