"""Quantized weights over several ranks: slices of the weights of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.engine.kernels.gpu.reference import experts as reference_experts
from millrace.engine.kernels.operations import Collectives, Linear
from millrace.engine.models.linears import Projection, ReducedLinear
from millrace.engine.models.stacked_experts import stacked_experts
from millrace.engine.quantization.device_experts import quantized_stacks
from millrace.engine.quantization.linear import DequantizedLinear
from millrace.engine.quantization.rounding import quantize_at_load
from millrace.engine.quantization.slicing import sliced
from millrace.engine.quantization.weight import Activations, QuantizedWeight
from millrace.registry.checkpoints.shard import Shard, Slice
from millrace.schemas.errors import CheckpointError
from tests.engine.checkpoints import save_model
from tests.engine.models.ranks import logits_of, on_ranks, weights_of
from tests.engine.models.test_shards import EXPERTS, RANKS, SIZES, same_logits
from tests.engine.quantization.drawn import random_weight
from tests.engine.quantization.test_formats import (
    COMPRESSED,
    FP8_METHOD,
    LAYERS,
    OTHERS,
    ROUNDED,
    awq_fields,
    fields_of,
    gptq_fields,
)
from tests.engine.quantization.written import Writer, awq, compressed, float8, gptq, rewrite


@RANKS
@pytest.mark.parametrize("group", COMPRESSED)
def test_compressed_tensors(tmp_path: Path, group: dict[str, Any], size: int) -> None:
    save_model(tmp_path, "Llama", **SIZES)
    rewrite(tmp_path, {LAYERS: compressed(group)}, fields_of(group))
    same_logits(logits_of(tmp_path, size=size), logits_of(tmp_path))


# Groups of 64 inputs are cut where four ranks have 32 each.
WIDER: list[Any] = [
    pytest.param(awq(64), awq_fields(64), LAYERS, id="awq-64"),
    pytest.param(gptq(4, 64, sym=False), gptq_fields(4, 64, sym=False), LAYERS, id="gptq-64"),
]


@RANKS
@pytest.mark.parametrize(("write", "fields", "modules"), OTHERS + WIDER)
def test_awq_and_gptq(
    tmp_path: Path, write: Writer, fields: dict[str, Any], modules: str, size: int
) -> None:
    save_model(tmp_path, "Llama", **SIZES)
    rewrite(tmp_path, {modules: write}, fields)
    same_logits(logits_of(tmp_path, size=size), logits_of(tmp_path))


def test_inputs_in_an_order_of_their_own_are_kept_wide_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_model(tmp_path, "Llama", **SIZES)
    rewrite(tmp_path, {LAYERS: gptq(4, 32, shuffled=True)}, gptq_fields(4, 32, desc_act=True))
    kept = on_ranks(2, lambda group: weights_of(tmp_path, Shard(group.rank, 2), group))
    for layer in kept[0].layers:
        assert isinstance(layer.output, ReducedLinear)
        assert isinstance(layer.output.linear, Projection)
    assert "are reordered" in caplog.text


@RANKS
@pytest.mark.parametrize("splits_experts", [False, True], ids=["slices", "whole-experts"])
def test_a_quantized_head_and_experts(tmp_path: Path, size: int, splits_experts: bool) -> None:
    save_model(tmp_path, "Mixtral", vocab_size=200, **(SIZES | EXPERTS))
    rewrite(
        tmp_path,
        {r"self_attn|experts\.|lm_head": gptq(4, 32)},
        gptq_fields(4, 32, lm_head=True),
    )
    ours = logits_of(tmp_path, size=size, splits_experts=splits_experts)
    same_logits(ours, logits_of(tmp_path))


@RANKS
@pytest.mark.parametrize("quantization", [None, "int4", "gptq"])
def test_stacks_of_experts(tmp_path: Path, size: int, quantization: str | None) -> None:
    save_model(tmp_path, "Qwen3Moe", **(SIZES | EXPERTS))
    if quantization == "gptq":
        rewrite(tmp_path, {r"self_attn|experts\.": gptq(4, 32)}, gptq_fields(4, 32))
    makers: dict[str, Any] = {
        "experts": stacked_experts(reference_experts, Projection, fixed=False),
        "stacks": quantized_stacks(reference_experts, torch.float32, has_kernels=False),
    }
    if quantization == "int4":
        makers["quantize"] = quantize_at_load("int4").layers
    same_logits(logits_of(tmp_path, size=size, **makers), logits_of(tmp_path, **makers))


@RANKS
@pytest.mark.parametrize(("write", "fields", "is_int8", "scales_of"), ROUNDED)
def test_rows_that_are_rounded(
    tmp_path: Path, write: Writer, fields: dict[str, Any], is_int8: bool, scales_of: Any, size: int
) -> None:
    """Sums in another order sometimes round to another step, and a rank's rows of sliced inputs
    have scales of their own. The result is as near to unrounded rows as that of one rank."""
    save_model(tmp_path, "Llama", **SIZES)
    rewrite(tmp_path, {LAYERS: write}, fields)
    whole, exact = logits_of(tmp_path), logits_of(tmp_path / "wide")
    ours = logits_of(tmp_path, size=size)
    assert float((ours - exact).norm()) <= 1.1 * float((whole - exact).norm())


def test_groups_of_rounded_inputs_that_a_slice_cuts(tmp_path: Path) -> None:
    save_model(tmp_path, "Llama", **SIZES)
    rewrite(tmp_path, {LAYERS: float8(64)}, FP8_METHOD | {"weight_block_size": [64, 64]})
    assert logits_of(tmp_path, size=2).isfinite().all()
    with pytest.raises(CheckpointError, match=r"o_proj are rounded in groups of 64.* end at 32"):
        logits_of(tmp_path, size=4)


def quantized_at_load(
    path: Path, quantization: str, shard: Shard, group: Collectives | None
) -> list[torch.Tensor]:
    """Return the values of a rank's quantized weights, in the order of the model."""
    values: list[torch.Tensor] = []

    def linear(weight: QuantizedWeight, bias: torch.Tensor | None) -> Linear:
        values.append(weight.values())
        return DequantizedLinear(weight, bias, torch.float32)

    at_load = quantize_at_load(quantization)
    weights_of(
        path,
        shard,
        group,
        quantized=linear,
        quantize=at_load.layers,
        quantize_head=at_load.head,
    )
    return values


@RANKS
@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_weights_quantized_at_load_are_slices_of_the_quantized_whole(
    tmp_path: Path, quantization: str, size: int
) -> None:
    save_model(tmp_path, "Llama", **SIZES)

    def of_rank(group: Collectives) -> list[torch.Tensor]:
        return quantized_at_load(tmp_path, quantization, Shard(group.rank, size), group)

    ranks = on_ranks(size, of_rank)
    *layers, head = quantized_at_load(tmp_path, quantization, Shard(), None)
    assert len(layers) == 4 * SIZES["num_hidden_layers"]
    assert torch.equal(torch.cat([own[-1] for own in ranks]), head)
    # The outputs of each part of a fused projection.
    parts = {0: [128, 64, 64], 2: [128, 128]}
    for number, values in enumerate(layers):
        for rank, own in enumerate(ranks):
            if number % 4 in parts:
                cut = [part.chunk(size)[rank] for part in torch.split(values, parts[number % 4])]
                assert torch.equal(own[number], torch.cat(cut))
            else:
                assert torch.equal(own[number], values.chunk(size, 1)[rank])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    num_groups=st.integers(1, 4),
    group_inputs=st.sampled_from([16, 32, 48]),
    cut=st.none() | st.tuples(st.integers(0, 11), st.integers(1, 12)),
    rows=st.none() | st.sampled_from([range(8), range(3), range(3, 8), range(7, 8)]),
    bits=st.sampled_from([4, 8]),
    has_zeros=st.booleans(),
    has_offsets=st.booleans(),
    has_order=st.booleans(),
)
def test_slices_have_the_values_of_the_whole(
    num_groups: int,
    group_inputs: int,
    cut: tuple[int, int] | None,
    rows: range | None,
    bits: int,
    has_zeros: bool,
    has_offsets: bool,
    has_order: bool,
) -> None:
    weight = random_weight(
        8,
        num_groups,
        group_inputs,
        bits=bits,
        has_zeros=has_zeros,
        has_offsets=has_offsets,
        has_order=has_order,
    )
    columns = None
    if cut is not None:
        begin, width = cut[0] * 16 % weight.num_inputs, cut[1] * 16
        columns = range(begin, min(begin + width, weight.num_inputs))
    part = sliced(weight, Slice(rows, columns), "m")
    values = part if isinstance(part, torch.Tensor) else part.values()
    wanted = weight.values()
    wanted = wanted if rows is None else wanted[rows.start : rows.stop]
    wanted = wanted if columns is None else wanted[:, columns.start : columns.stop]
    assert torch.equal(values, wanted)
    assert isinstance(part, torch.Tensor) is (has_order and columns is not None)
    kept: list[torch.Tensor | None] = [part] if isinstance(part, torch.Tensor) else []
    if not isinstance(part, torch.Tensor):
        kept = [part.codes, part.scales, part.zeros, part.offsets]
    for own in kept:
        assert own is None or own.untyped_storage().nbytes() == own.numel() * own.element_size()


def test_rounded_inputs_in_an_order_of_their_own_are_refused() -> None:
    weight = random_weight(8, 2, 16, has_order=True, activations=Activations.INT8_TOKEN)
    with pytest.raises(CheckpointError, match=r"m are rounded \(int8_token\) and reordered"):
        sliced(weight, Slice(columns=range(16)), "m")
