"""Wide weights rounded to few bits, by formulas written anew."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from millrace.engine.quantization.rounding import (
    fitting_group,
    quantize_at_load,
    rounded_float8,
    rounded_int4,
    rounded_int4_groups,
    rounded_int8,
    rounded_int8_groups,
)
from millrace.engine.quantization.weight import Activations, QuantizedWeight

Rounded = Callable[..., QuantizedWeight]


def drawn(num_outputs: int, num_inputs: int, seed: int = 0) -> torch.Tensor:
    """Draw outputs of very different magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    magnitudes = torch.logspace(-3, 1, num_outputs).unsqueeze(1)
    return torch.randn(num_outputs, num_inputs, generator=generator) * magnitudes


def relative_error(made: QuantizedWeight, weight: torch.Tensor) -> float:
    return float((made.values() - weight).norm() / weight.norm())


def test_int8_is_off_by_half_a_step_at_most() -> None:
    weight = drawn(20, 48)
    made = rounded_int8(weight)
    assert (made.codes.dtype, made.bits, made.activations) == (
        torch.int8,
        8,
        Activations.INT8_TOKEN,
    )
    step = weight.abs().amax(1, keepdim=True) / 127
    torch.testing.assert_close(made.scales, step)
    assert ((made.values() - weight).abs() <= step * 0.5001).all()
    assert made.codes.abs().amax(1).eq(127).all()
    assert (made.zeros, made.order, made.group_inputs) == (None, None, 48)


def test_float8_keeps_three_bits_behind_the_first() -> None:
    weight = drawn(20, 48)
    made = rounded_float8(weight)
    assert (made.codes.dtype, made.activations) == (
        torch.float8_e4m3fn,
        Activations.FLOAT8_TOKEN,
    )
    step = weight.abs().amax(1, keepdim=True) / 448
    # The least numbers of the type are 2^-9 apart.
    bound = torch.maximum(weight.abs() / 16, step * 2**-10)
    assert ((made.values() - weight).abs() <= bound * 1.0001).all()


def test_int8_groups_are_off_by_half_a_step_at_most() -> None:
    weight = drawn(20, 96)
    made = rounded_int8_groups(weight)
    assert (made.codes.dtype, made.bits, made.group_inputs) == (torch.int8, 8, 32)
    assert (made.activations, made.offsets) == (Activations.INT16_GROUP, None)
    step = weight.reshape(20, 3, 32).abs().amax(-1) / 127
    torch.testing.assert_close(made.scales, step, rtol=2**-6, atol=0)
    errors = (made.values() - weight).reshape(20, 3, 32).abs().amax(-1)
    # A scale in half precision may be too small for the largest weight of its group.
    assert (errors <= step * 0.51 + (step - made.scales).clamp(min=0) * 127).all()


def test_int4_groups_have_a_scale_and_an_offset() -> None:
    weight = drawn(12, 256)
    made = rounded_int4_groups(weight)
    assert (made.bits, made.group_inputs, made.activations) == (4, 32, Activations.INT16_GROUP)
    assert (int(made.codes.min()), int(made.codes.max())) == (-8, 7)
    assert made.offsets is not None
    assert made.scales.shape == made.offsets.shape == (12, 8)
    assert relative_error(made, weight) < 0.085
    # Groups off the middle are no worse.
    assert relative_error(rounded_int4_groups(weight.abs() + 3), weight.abs() + 3) < 0.03


def test_int4_groups_keep_large_weights() -> None:
    """Errors weighted by magnitudes are smaller than those of the smallest and largest weight."""
    weight = drawn(64, 512).reshape(64, 16, 32)
    made = rounded_int4_groups(weight.flatten(1)).values().reshape(weight.shape)
    low, high = weight.amin(-1, keepdim=True), weight.amax(-1, keepdim=True)
    plain = ((weight - low) / (high - low) * 15).round() / 15 * (high - low) + low
    importance = weight.square().mean(-1, keepdim=True).sqrt() + weight.abs()
    ours, theirs = ((importance * (one - weight).square()).sum() for one in (made, plain))
    assert ours < 0.85 * theirs


@pytest.mark.parametrize("rounded", [rounded_int8_groups, rounded_int4_groups])
def test_scales_of_groups_are_stored_in_half_precision_if_it_holds_them(rounded: Rounded) -> None:
    weight = drawn(12, 128)
    for factor, is_half in ((1.0, True), (1e-6, False), (1e9, False)):
        made = rounded(weight * factor)
        numbers = [made.scales, *(() if made.offsets is None else (made.offsets,))]
        assert all(torch.equal(one.half().float(), one) for one in numbers) == is_half
        assert relative_error(made, weight * factor) < 0.085


@pytest.mark.parametrize(
    ("rounded", "plain"),
    [(rounded_int8_groups, rounded_int8), (rounded_int4_groups, rounded_int4)],
)
def test_inputs_that_32_does_not_divide_are_rounded_without_groups_of_32(
    rounded: Rounded, plain: Rounded
) -> None:
    weight = drawn(6, 48)
    made, expected = rounded(weight), plain(weight)
    assert torch.equal(made.values(), expected.values())
    assert made.activations is expected.activations


def test_a_constant_group_keeps_its_value() -> None:
    weight = torch.full((2, 64), 0.375)
    assert torch.equal(rounded_int4_groups(weight).values(), weight)


@pytest.mark.parametrize("symmetric", [True, False])
def test_int4_has_a_scale_for_each_group(symmetric: bool) -> None:
    weight = drawn(12, 256)
    made = rounded_int4(weight, group_inputs=64, symmetric=symmetric)
    assert made.codes.dtype is torch.int8
    assert (made.bits, made.group_inputs, made.activations) == (4, 64, Activations.WIDE)
    assert (int(made.codes.min()), int(made.codes.max())) == (-8, 7)
    assert made.scales.shape == (12, 4)
    assert (made.zeros is None) == symmetric
    if made.zeros is not None:
        assert (made.zeros.dtype, made.zeros.shape) == (torch.int16, (12, 4))
    assert relative_error(made, weight) < 0.12


def test_int4_clips_what_makes_all_else_coarse() -> None:
    weight = drawn(16, 512)
    groups = weight.reshape(16, 4, 128)
    scales = groups.abs().amax(-1, keepdim=True) / 7
    plain = ((groups / scales).round().clamp(-8, 7) * scales).flatten(1)
    ours, theirs = ((values - weight).norm() for values in (rounded_int4(weight).values(), plain))
    assert ours < 0.97 * theirs


def test_int4_with_zero_points_is_for_groups_off_the_middle() -> None:
    weight = drawn(8, 256).abs() + 0.01
    wide = relative_error(rounded_int4(weight), weight)
    assert relative_error(rounded_int4(weight, symmetric=False), weight) < 0.6 * wide


@pytest.mark.parametrize(
    ("num_inputs", "wanted", "size"),
    [
        (256, 128, 128),
        (48, 16, 16),
        (192, 128, 96),
        (160, 128, 32),
        (64, 128, 64),
        (48, 128, 48),
        (7, 128, 7),
        (96, 64, 32),
    ],
)
def test_a_group_divides_the_inputs(num_inputs: int, wanted: int, size: int) -> None:
    assert fitting_group(num_inputs, wanted) == size
    made = rounded_int4(torch.ones(2, num_inputs), group_inputs=wanted)
    assert made.scales.shape == (2, num_inputs // size)
    torch.testing.assert_close(made.values(), torch.ones(2, num_inputs), atol=0.02, rtol=0)


@pytest.mark.parametrize(
    "rounded",
    [rounded_int8, rounded_int4, rounded_float8, rounded_int8_groups, rounded_int4_groups],
)
def test_zeros_stay_zeros(rounded: Rounded) -> None:
    weight = drawn(4, 64)
    weight[1] = 0
    values = rounded(weight).values()
    assert values[1].eq(0).all()
    assert torch.isfinite(values).all()


@pytest.mark.parametrize("rounded", [rounded_int8, rounded_int4, rounded_float8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scales_are_as_they_will_be_stored(rounded: Rounded, dtype: torch.dtype) -> None:
    weight = drawn(12, 128)
    made = rounded(weight, scale_dtype=dtype)
    assert made.scales.dtype is torch.float32
    assert torch.equal(made.scales.to(dtype).float(), made.scales)
    assert relative_error(made, weight) < 1.1 * relative_error(rounded(weight), weight)
    # Even where the type has next to no numbers.
    assert torch.isfinite(rounded(weight * 1e-6, scale_dtype=dtype).values()).all()


def test_a_head_has_eight_bits() -> None:
    weight = drawn(8, 128)
    made = {
        name: [of(weight) for of in quantize_at_load(name) if of is not None]
        for name in ("int8", "int4", "fp8")
    }
    assert {name: [one.bits for one in both] for name, both in made.items()} == {
        "int8": [8, 8],
        "int4": [4, 8],
        "fp8": [8, 8],
    }
    assert made["fp8"][1].codes.dtype is torch.float8_e4m3fn
    assert quantize_at_load(None) == (None, None)
