"""Fused projections, experts and heads of quantized checkpoints, and quantizing at load."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from safetensors.torch import load_file, save_file

from millrace.engine.kernels.gpu.reference import experts as reference_experts
from millrace.engine.kernels.operations import Linear
from millrace.engine.models.decoder import DecoderWeights
from millrace.engine.models.linears import Projection
from millrace.engine.models.loader import load_weights
from millrace.engine.models.mlp import GatedMLP, MixtureOfExperts, plus_mlp
from millrace.engine.models.stacked_experts import stacked_experts
from millrace.engine.quantization.linear import DequantizedLinear, SplitLinear
from millrace.engine.quantization.weight import QuantizedWeight
from millrace.registry.checkpoints.checkpoint import read_model_config
from millrace.schemas.errors import CheckpointError, ConfigError
from tests.engine.checkpoints import save_model
from tests.engine.quantization.written import WIDE, Writer, awq, float8, gptq, rewrite

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96}
DENSE = SIZES | {"num_attention_heads": 4}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
AWQ = {"quant_method": "awq", "group_size": 32, "bits": 4, "modules_to_not_convert": ["gate"]}
FP8 = {"quant_method": "fp8", "activation_scheme": "static"}
load = partial(load_weights, dtype=torch.float32, device=CPU)


def weights_of(path: Path, **makers: Any) -> DecoderWeights:
    weights: DecoderWeights = load(path, read_model_config(path), **makers)
    return weights


def rows_of(size: int = 64) -> torch.Tensor:
    return torch.randn(5, size, generator=torch.Generator().manual_seed(0))


def assert_same(ours: Linear, theirs: Linear) -> None:
    torch.testing.assert_close(ours(rows_of()), theirs(rows_of()), rtol=1e-5, atol=1e-5)


def saved(path: Path, writers: dict[str, Writer], config: dict[str, Any], **changes: Any) -> None:
    save_model(path, "Llama", **(DENSE | changes))
    rewrite(path, writers, config)


def test_parts_that_are_alike_become_one(tmp_path: Path) -> None:
    saved(tmp_path, {"self_attn|mlp": gptq(4, 32, shuffled=True)}, GPTQ)
    made: list[QuantizedWeight] = []

    def quantized(weight: QuantizedWeight, bias: torch.Tensor | None) -> Linear:
        made.append(weight)
        return DequantizedLinear(weight, bias, torch.float32)

    weights_of(tmp_path, quantized=quantized)
    assert [weight.num_outputs for weight in made] == [128, 64, 192, 64] * 2
    assert all(weight.order is not None for weight in made)


def test_parts_of_different_schemes_stand_side_by_side(tmp_path: Path) -> None:
    """The biases of the parts stand side by side, too."""
    writers = {"q_proj": gptq(8, -1), r"k_proj|gate_proj|down_proj": gptq(4, 32)}
    dynamic = {"-:.*v_proj": {}, ".*q_proj": {"bits": 8, "group_size": -1}}
    saved(tmp_path, writers, GPTQ | {"dynamic": dynamic}, attention_bias=True)
    ours, wide = weights_of(tmp_path), weights_of(tmp_path / WIDE)
    for left, right in zip(ours.layers, wide.layers, strict=True):
        assert isinstance(left.qkv, SplitLinear)
        assert_same(left.qkv, right.qkv)
        assert isinstance(left.mlp, GatedMLP)
        assert isinstance(right.mlp, GatedMLP)
        assert isinstance(left.mlp.gate_up, SplitLinear)
        assert_same(left.mlp.gate_up, right.mlp.gate_up)
        assert isinstance(left.output, Projection)


def test_parts_whose_inputs_have_different_scales_stand_side_by_side(tmp_path: Path) -> None:
    saved(tmp_path, {"self_attn|mlp": float8(None, static=True)}, FP8)
    change = {"model.layers.0.self_attn.k_proj.input_scale": torch.tensor(0.02)}
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | change, file)
    layers = weights_of(tmp_path).layers
    assert isinstance(layers[0].qkv, SplitLinear)
    assert isinstance(layers[1].qkv, DequantizedLinear)


MIXTURES: list[Any] = [
    pytest.param("Mixtral", awq(32), AWQ, id="mixtral"),
    pytest.param("Qwen3Moe", gptq(4, 32), GPTQ, id="qwen3-moe"),
]
MIXTURE = {"moe_intermediate_size": 96, "num_experts_per_tok": 2, "num_attention_heads": 4}
ATTENTION_AND_EXPERTS = r"self_attn|experts\."


def save_mixture(path: Path, family: str, write: Writer, config: dict[str, Any]) -> None:
    experts = {"num_local_experts" if family == "Mixtral" else "num_experts": 4}
    save_model(path, family, **(SIZES | MIXTURE | experts))
    rewrite(path, {ATTENTION_AND_EXPERTS: write}, config)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


@pytest.mark.parametrize(("family", "write", "config"), MIXTURES)
@pytest.mark.parametrize("is_stacked", [False, True])
def test_experts(
    tmp_path: Path, family: str, write: Writer, config: dict[str, Any], is_stacked: bool
) -> None:
    """The router stays wide, whether the config names it or not."""
    save_mixture(tmp_path, family, write, config)
    make = stacked_experts(reference_experts, Projection, fixed=False)
    ours = weights_of(tmp_path, experts=make if is_stacked else None)
    wide, rows = weights_of(tmp_path / WIDE), rows_of()
    for left, right in zip(ours.layers, wide.layers, strict=True):
        torch.testing.assert_close(
            plus_mlp(rows.clone(), rows, left.mlp, swiglu),
            plus_mlp(rows.clone(), rows, right.mlp, swiglu),
            rtol=1e-4,
            atol=1e-4,
        )


def test_a_stack_of_experts_does_not_round_its_inputs(tmp_path: Path) -> None:
    save_mixture(tmp_path, "Mixtral", float8(None, static=True), FP8)
    make = stacked_experts(reference_experts, Projection, fixed=False)
    with pytest.raises(CheckpointError, match=r"experts\.0\.w1 are rounded \(float8_tensor\)"):
        weights_of(tmp_path, experts=make)
    assert isinstance(weights_of(tmp_path).layers[0].mlp, MixtureOfExperts)


def by_outputs(weight: torch.Tensor) -> QuantizedWeight:
    scales = weight.abs().amax(1, keepdim=True) / 127
    return QuantizedWeight((weight / scales).round().to(torch.int8), scales, weight.shape[1])


def test_wide_weights_are_quantized_at_load(tmp_path: Path) -> None:
    save_model(tmp_path, "Llama", **DENSE)
    wide = weights_of(tmp_path)
    ours = weights_of(tmp_path, quantize=by_outputs)
    assert isinstance(ours.layers[0].qkv, DequantizedLinear)
    assert isinstance(ours.head, Projection)
    assert float((ours.layers[0].qkv(rows_of()) - wide.layers[0].qkv(rows_of())).abs().max()) > 0
    torch.testing.assert_close(
        ours.layers[0].qkv(rows_of()), wide.layers[0].qkv(rows_of()), rtol=0.05, atol=0.3
    )
    with_head = weights_of(tmp_path, quantize_head=by_outputs)
    assert isinstance(with_head.head, DequantizedLinear)
    assert isinstance(with_head.layers[0].qkv, Projection)


def test_experts_are_quantized_at_load(tmp_path: Path) -> None:
    changes = SIZES | MIXTURE | {"num_local_experts": 4}
    save_model(tmp_path, "Mixtral", **changes)
    mixture = weights_of(tmp_path, quantize=by_outputs).layers[0].mlp
    assert isinstance(mixture, MixtureOfExperts)
    assert isinstance(mixture.experts[0].down, DequantizedLinear)


def test_quantized_weights_are_not_quantized_again(tmp_path: Path) -> None:
    saved(tmp_path, {"self_attn|mlp": gptq(4, 32)}, GPTQ)
    with pytest.raises(ConfigError, match="already, by gptq"):
        weights_of(tmp_path, quantize=by_outputs)


def test_scales_of_a_smaller_cache_are_ignored_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, {"self_attn|mlp": float8(None)}, FP8 | {"activation_scheme": "dynamic"})
    file = tmp_path / "model.safetensors"
    scale = {"model.layers.0.self_attn.k_scale": torch.tensor(0.5)}
    save_file(load_file(file) | scale, file)
    weights_of(tmp_path)
    assert "1 scales are ignored" in caplog.text


def test_zeros_that_a_writer_added_change_nothing(tmp_path: Path) -> None:
    """Older GPTQ checkpoints have zeros where there is no bias."""
    saved(tmp_path, {"self_attn|mlp": gptq(4, 32)}, GPTQ)
    file = tmp_path / "model.safetensors"
    name = "model.layers.0.self_attn.q_proj.bias"
    zeros = {name: torch.zeros(64), "model.layers.0.mlp.up_proj.input_zero_point": torch.zeros(1)}
    save_file(load_file(file) | zeros, file)
    weights_of(tmp_path)
    save_file(load_file(file) | {name: torch.ones(64)}, file)
    with pytest.raises(CheckpointError, match=r"q_proj\.bias"):
        weights_of(tmp_path)
