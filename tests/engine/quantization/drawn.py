"""Quantized weights of every kind, drawn."""

from __future__ import annotations

from dataclasses import replace

import torch

from millrace.engine.quantization.weight import Activations, QuantizedWeight

INT8_ROWS = (Activations.INT8_TOKEN, Activations.INT8_TENSOR)
FLOAT8_ROWS = (Activations.FLOAT8_TOKEN, Activations.FLOAT8_TENSOR, Activations.FLOAT8_GROUP)


def random_weight(
    num_outputs: int,
    num_groups: int,
    group_inputs: int,
    *,
    is_float: bool = False,
    bits: int = 8,
    has_zeros: bool = False,
    has_order: bool = False,
    has_offsets: bool = False,
    is_signed: bool = True,
    activations: Activations = Activations.WIDE,
) -> QuantizedWeight:
    """Draw a weight about as large as a wide weight of the same width.

    Codes of fewer than 8 bits begin at 0 if not ``is_signed``.
    """
    num_inputs = num_groups * group_inputs
    most = 1 << bits - 1
    least = -most
    if not is_signed:
        least, most = 0, 2 * most
    if is_float:
        codes = (torch.randn(num_outputs, num_inputs) * 60).to(torch.float8_e4m3fn)
    else:
        codes = torch.randint(least, most, (num_outputs, num_inputs), dtype=torch.int8)
    spread = 60 if is_float else most
    return QuantizedWeight(
        codes=codes,
        scales=torch.rand(num_outputs, num_groups) / spread + 0.1 / spread,
        group_inputs=group_inputs,
        bits=bits,
        zeros=(
            torch.randint(least, most, (num_outputs, num_groups), dtype=torch.int16)
            if has_zeros
            else None
        ),
        order=torch.randperm(num_inputs) if has_order else None,
        activations=activations,
        activation_scale=0.03 if activations.is_static else None,
        offsets=torch.randn(num_outputs, num_groups) / 4 if has_offsets else None,
    )


def in_half(weight: QuantizedWeight) -> QuantizedWeight:
    """Round the scales and offsets of ``weight`` to half precision."""
    offsets = None if weight.offsets is None else weight.offsets.half().float()
    return replace(weight, scales=weight.scales.half().float(), offsets=offsets)


def exact_product(weight: QuantizedWeight, rows: torch.Tensor) -> torch.Tensor:
    """Compute the product in float64, with rows rounded as the weight asks."""
    rounded = rows if weight.order is None else rows[:, weight.order]
    rounded = weight.rounding(rounded.double().float())
    in_order = replace(weight, order=None)
    return rounded.double() @ in_order.values(torch.float64).T
