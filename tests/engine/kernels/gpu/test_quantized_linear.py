"""Linear maps of quantized weights as a decoder calls them, by kernels and without."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)

from millrace.engine.kernels.gpu.kernel_set import choose_kernels
from millrace.engine.kernels.gpu.quantized.library import (
    fits_library,
    library_linear,
    library_takes,
    prefers_library,
)
from millrace.engine.kernels.gpu.quantized.rounding import round_rows
from millrace.engine.kernels.operations import Linear
from millrace.engine.models.linears import DeviceLinear
from millrace.engine.quantization import device, device_linear
from millrace.engine.quantization.device import RoundedLinear, quantized_linears, why_not_packed
from millrace.engine.quantization.device_linear import QuantizedDeviceLinear, packed
from millrace.engine.quantization.linear import MakeQuantized
from millrace.engine.quantization.weight import Activations, QuantizedWeight
from tests.engine.kernels.gpu.quantized_cases import (
    FLOAT8,
    KINDS,
    Kind,
    assert_near,
    drawn_weight,
    exact,
)

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _poisoned(poisoned_outputs: None) -> None:
    """Poison outputs, so that unwritten elements show."""


def factory(dtype: torch.dtype, *, fixed: bool = False, kernels: str = "triton") -> MakeQuantized:
    product = partial(DeviceLinear, kernels=choose_kernels(kernels, CPU), fixed=fixed)
    return quantized_linears(product, dtype, fixed=fixed, has_kernels=kernels == "triton")


def swiglu(rows: torch.Tensor) -> torch.Tensor:
    gate, up = rows.chunk(2, -1)
    return F.silu(gate) * up


def check(linear: Linear, weight: QuantizedWeight, bias: torch.Tensor | None) -> None:
    """Check all calls of a decoder, with few rows and with more."""
    for num_rows in (1, 5):
        rows = torch.randn(num_rows, weight.num_inputs)
        total = torch.randn(num_rows, weight.num_outputs)
        expected = exact(rows, weight)
        if bias is not None:
            expected += bias.double()
        assert_near(linear(rows), expected)
        assert_near(linear.plus(total.clone(), rows), total.double() + expected)
        assert_near(linear.gated(rows, swiglu), swiglu(expected))


@pytest.mark.parametrize(
    ("kind", "ordered"), [*((kind, False) for kind in KINDS), (KINDS[1], True), (KINDS[7], True)]
)
def test_quantized_linear_equals_the_product_with_its_weight(kind: Kind, ordered: bool) -> None:
    torch.manual_seed(len(str(kind)))
    weight = drawn_weight(kind, 34, 256, 128, ordered=ordered)
    bias = torch.randn(34) if kind.zeroed else None
    linear = factory(torch.float32)(weight, bias)
    assert isinstance(linear, QuantizedDeviceLinear)
    check(linear, weight, bias)


WIDENED = {
    "72 inputs in groups of 72": drawn_weight(Kind(8, Activations.WIDE), 10, 72, 72),
    "80 inputs in groups of 40": drawn_weight(Kind(4, Activations.WIDE), 10, 80, 40),
    "48 inputs in groups of 48": drawn_weight(Kind(8, Activations.INT8_TOKEN), 10, 48, 48),
    "zeros of 8 bits for rows of 8 bits": drawn_weight(
        Kind(8, Activations.INT8_TOKEN, zeroed=True), 10, 64, 64
    ),
    "codes of torch.int8 for rows of float8_token": drawn_weight(
        Kind(8, Activations.FLOAT8_TOKEN), 10, 64, 64
    ),
    "codes of torch.float8_e4m3fn for rows of int8_tensor": drawn_weight(
        Kind(8, Activations.INT8_TENSOR, is_float8=True), 10, 64, 64
    ),
    "rows rounded in groups of 96": drawn_weight(
        Kind(8, Activations.FLOAT8_GROUP, is_float8=True), 10, 192, 96
    ),
    "groups of rows in another order": drawn_weight(
        Kind(8, Activations.FLOAT8_GROUP, is_float8=True), 10, 256, 128, ordered=True
    ),
}


@pytest.mark.parametrize("reason", WIDENED)
def test_what_no_kernel_takes_is_widened(reason: str, caplog: pytest.LogCaptureFixture) -> None:
    weight = WIDENED[reason]
    bias = torch.randn(10)
    with caplog.at_level(logging.WARNING, device.__name__):
        make = factory(torch.float32)
        linear, _ = make(weight, bias), make(weight, bias)
    assert len(caplog.records) == 1
    assert reason in caplog.text
    assert isinstance(linear, DeviceLinear | RoundedLinear)
    check(linear, weight, bias)


@pytest.mark.parametrize("kind", KINDS[:3], ids=str)
def test_the_reference_has_no_kernels(kind: Kind) -> None:
    weight = drawn_weight(kind, 10, 64, 64)
    linear = factory(torch.float32, kernels="reference")(weight, None)
    assert not isinstance(linear, QuantizedDeviceLinear)
    check(linear, weight, None)


@pytest.mark.parametrize("num_inputs", [256, 72])
def test_a_fixed_one_computes_a_row_the_same_in_any_company(num_inputs: int) -> None:
    weight = drawn_weight(Kind(8, Activations.INT8_TOKEN), 40, num_inputs, num_inputs)
    linear = factory(torch.float32, fixed=True)(weight, None)
    rows, total = torch.randn(20, num_inputs), torch.randn(20, 40)
    for count in (1, 19):
        assert torch.equal(linear(rows[:count]), linear(rows)[:count])
        assert torch.equal(
            linear.plus(total[:count].clone(), rows[:count]),
            linear.plus(total.clone(), rows)[:count],
        )


@pytest.mark.parametrize("activations", [Activations.FLOAT8_TOKEN, Activations.FLOAT8_TENSOR])
@pytest.mark.parametrize("bias", [None, torch.linspace(-1, 1, 48, dtype=torch.bfloat16)])
def test_the_library_computes_the_same(activations: Activations, bias: torch.Tensor | None) -> None:
    weight = drawn_weight(Kind(8, activations, is_float8=True), 48, 256, 256)
    made, rows = packed(weight), torch.randn(140, 256).bfloat16()
    rounded = round_rows(rows, FLOAT8, weight.activation_scale)
    expected = exact(rows, weight) + (0 if bias is None else bias.double())
    scales = made.scales.float()
    assert_near(library_linear(rounded, made, scales, bias, torch.bfloat16), expected)


def test_the_library_takes_what_it_has_a_product_for() -> None:
    kind = Kind(8, Activations.FLOAT8_TOKEN, is_float8=True)
    weight = packed(drawn_weight(kind, 48, 256, 256))
    assert fits_library(weight, torch.bfloat16)
    assert not library_takes(weight, torch.bfloat16)
    assert not fits_library(weight, torch.float16)
    assert not fits_library(packed(drawn_weight(kind, 47, 256, 256)), torch.bfloat16)
    assert not fits_library(packed(drawn_weight(kind, 48, 256, 128)), torch.bfloat16)
    assert not fits_library(packed(drawn_weight(KINDS[5], 48, 256, 256)), torch.bfloat16)
    assert not prefers_library(16)
    assert prefers_library(1024)


@pytest.mark.parametrize("bias", [None, torch.linspace(-1, 1, 48, dtype=torch.bfloat16)])
def test_many_rows_are_the_librarys(
    monkeypatch: pytest.MonkeyPatch, bias: torch.Tensor | None
) -> None:
    monkeypatch.setattr(device_linear, "library_takes", lambda weight, dtype: True)
    monkeypatch.setattr(device_linear, "prefers_library", lambda num_rows: num_rows > 4)
    weight = drawn_weight(Kind(8, Activations.FLOAT8_TOKEN, is_float8=True), 48, 256, 256)
    weight = replace(weight, order=torch.randperm(256))
    linear = QuantizedDeviceLinear(weight, bias, torch.bfloat16, fixed=False)
    for num_rows in (4, 5):
        rows = torch.randn(num_rows, 256).bfloat16()
        expected = exact(rows, weight) + (0 if bias is None else bias.double())
        assert_near(linear(rows), expected)
        total = torch.randn(num_rows, 48).bfloat16()
        assert_near(linear.plus(total.clone(), rows), total.double() + expected)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("num_rows", [1, 5, 40])
def test_unrounded_products_are_float32(fixed: bool, num_rows: int) -> None:
    """Their error is that of float32 sums, far below a last bit of the rows' 16."""
    weight = drawn_weight(KINDS[0], 48, 256, 128)
    bias = torch.linspace(-1, 1, 48, dtype=torch.float16)
    linear = QuantizedDeviceLinear(weight, bias, torch.float16, fixed=fixed)
    rows = torch.randn(num_rows, 256).half()
    product = linear.unrounded(rows)
    assert product.dtype is torch.float32
    expected = exact(rows, weight) + bias.double()
    assert (product - expected).abs().max() < 1e-5 * expected.abs().max()


def test_nothing_is_against_what_kernels_take() -> None:
    for kind in KINDS:
        assert why_not_packed(drawn_weight(kind, 3, 256, 128)) is None
