"""Quantized weights: their values, the rounding of their rows, and several as one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from millrace.engine.quantization.weight import (
    Activations,
    QuantizedWeight,
    Rounding,
    as_one,
    can_be_one,
)
from tests.engine.quantization.drawn import random_weight


def test_a_value_is_its_code_times_the_scale_of_its_group_plus_the_offset() -> None:
    weight = random_weight(5, 3, 16, bits=5, has_offsets=True, has_zeros=True, has_order=True)
    assert weight.zeros is not None
    assert weight.offsets is not None
    assert weight.order is not None
    expected = torch.empty(5, 48)
    for column, place in enumerate(weight.order.tolist()):
        group = column // 16
        codes = weight.codes[:, column].float() - weight.zeros[:, group]
        expected[:, place] = codes * weight.scales[:, group] + weight.offsets[:, group]
    assert torch.equal(weight.values(), expected)


@pytest.mark.parametrize("num_inputs", [32, 64, 80])
def test_rows_of_int16_have_a_scale_for_each_32_inputs(num_inputs: int) -> None:
    torch.manual_seed(4)
    rows = torch.randn(3, num_inputs) * torch.logspace(-4, 3, num_inputs)
    rows[1, :32] = 0
    rounded = Rounding(Activations.INT16_GROUP, None, 32)(rows)
    for begin in range(0, num_inputs, 32):
        group, made = rows[:, begin : begin + 32], rounded[:, begin : begin + 32]
        step = group.abs().amax(1, keepdim=True) / 32767
        assert ((made - group).abs() <= step * 0.501).all()
    weight = random_weight(4, num_inputs // 16, 16, activations=Activations.INT16_GROUP)
    assert weight.rounding == Rounding(Activations.INT16_GROUP, None, 32)


@pytest.mark.parametrize(
    ("weight", "code_zero"),
    [
        (random_weight(4, 2, 16, bits=4), 8),
        (random_weight(4, 2, 16, bits=4, has_offsets=True), 8),
        (random_weight(4, 2, 16, bits=5, has_offsets=True, is_signed=False), 0),
        (random_weight(4, 2, 16, bits=6), 32),
        (random_weight(4, 2, 16, bits=8, has_offsets=True), 0),
    ],
    ids=["4 bits", "4 bits, offsets", "5 bits from 0 on", "6 bits", "8 bits"],
)
def test_codes_plus_their_zero_are_from_0_on(weight: QuantizedWeight, code_zero: int) -> None:
    assert weight.code_zero == code_zero
    if weight.bits < 8:
        assert int((weight.codes + code_zero).min()) >= 0


def test_one_weight_holds_the_offsets_of_all_its_parts() -> None:
    parts = [random_weight(4 + i, 2, 32, bits=4, has_offsets=True) for i in range(3)]
    assert can_be_one(parts)
    assert torch.equal(as_one(parts).values(), torch.cat([part.values() for part in parts]))
    others = [
        replace(parts[1], offsets=None),
        random_weight(5, 2, 32, bits=4, has_offsets=True, is_signed=False),
    ]
    assert not any(can_be_one([parts[0], other]) for other in others)
