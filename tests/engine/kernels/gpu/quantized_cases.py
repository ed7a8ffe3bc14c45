"""Quantized weights of every kind, and the tolerance of products with them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from millrace.engine.kernels.gpu.quantized.rounding import RoundedRows
from millrace.engine.quantization.device_linear import rounded
from millrace.engine.quantization.weight import Activations, QuantizedWeight

FLOAT8 = torch.float8_e4m3fn


class Kind(NamedTuple):
    """Kind of a quantized weight: bits of its codes, or float8, and the rounding of rows."""

    bits: int
    activations: Activations
    is_float8: bool = False
    zeroed: bool = False
    has_offsets: bool = False
    is_signed: bool = True


KINDS = (
    Kind(4, Activations.WIDE),
    Kind(4, Activations.WIDE, zeroed=True),
    Kind(4, Activations.INT8_TOKEN),
    Kind(4, Activations.INT8_TENSOR, zeroed=True),
    Kind(4, Activations.FLOAT8_TOKEN, zeroed=True),
    Kind(8, Activations.WIDE),
    Kind(8, Activations.WIDE, zeroed=True),
    Kind(8, Activations.INT8_TOKEN),
    Kind(8, Activations.INT8_TENSOR),
    Kind(8, Activations.WIDE, is_float8=True),
    Kind(8, Activations.FLOAT8_TOKEN, is_float8=True),
    Kind(8, Activations.FLOAT8_TENSOR, is_float8=True),
    Kind(8, Activations.FLOAT8_GROUP, is_float8=True),
    Kind(4, Activations.INT16_GROUP, has_offsets=True),
    Kind(4, Activations.INT16_GROUP, has_offsets=True, is_signed=False),
    Kind(6, Activations.INT16_GROUP),
    Kind(8, Activations.INT16_GROUP, has_offsets=True),
)


def drawn_weight(
    kind: Kind, num_outputs: int, num_inputs: int, group_inputs: int, *, ordered: bool = False
) -> QuantizedWeight:
    """Draw a quantized weight from torch's random numbers; codes and zeros use all their bits."""
    most = 1 << kind.bits - 1
    size = (num_outputs, -(-num_inputs // group_inputs))
    if kind.is_float8:
        codes = (torch.randn(num_outputs, num_inputs) * 100).clamp(-448, 448).to(FLOAT8)
    else:
        least = -most if kind.is_signed else 0
        shape = (num_outputs, num_inputs)
        codes = torch.randint(least, least + 2 * most, shape, dtype=torch.int8)
    return QuantizedWeight(
        codes=codes,
        scales=(torch.rand(size) + 0.5) / (most * num_inputs**0.5),
        group_inputs=group_inputs,
        bits=kind.bits,
        zeros=torch.randint(-most, most, size, dtype=torch.int16) if kind.zeroed else None,
        order=torch.randperm(num_inputs) if ordered else None,
        activations=kind.activations,
        activation_scale=0.02 if kind.activations.is_static else None,
        offsets=torch.randn(size) / num_inputs**0.5 if kind.has_offsets else None,
    )


def exact(rows: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """Return the product in float64, with rows rounded as the weight requires."""
    wide = weight.activations.may_stay_wide
    operand = rows if wide else weight.rounding(rows.float())
    return operand.double() @ weight.values(torch.float64).t()


def as_multiplied(rows: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor | RoundedRows:
    """Return ``rows`` as a product with ``weight`` takes them."""
    return rounded(rows, weight.rounding)


def assert_near(result: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert that the whole error and the largest error are within one rounding."""
    tolerance = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[result.dtype]
    difference = result.double() - expected.double()
    assert difference.shape == expected.shape
    if expected.numel():
        assert difference.norm() <= tolerance * expected.norm()
        assert difference.abs().max() <= tolerance * expected.abs().max()
