"""Formats of quantized checkpoints, compared with the weights that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.engine.devices.cpu.runner import ModelRunner
from millrace.engine.scheduling.schedule import ScheduledSequence
from millrace.engine.step.engine import Engine
from millrace.engine.step.sequence import Sequence
from millrace.engine.step.settings import resolve
from millrace.schemas.config import EngineConfig
from tests.engine.checkpoints import reference_greedy, reference_logits, save_model
from tests.engine.quantization.written import (
    Writer,
    awq,
    compressed,
    float8,
    gptq,
    rewrite,
    save_compressed,
    wide_model,
)
from tests.engine.support import drain, prompt, request, tokens_by_request

SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
}
CONFIG = EngineConfig(num_blocks=32, dtype="float32", device="cpu")
PROMPT = prompt(1, 50)
LINEAR = r"self_attn|mlp\.|lm_head"
LAYERS = r"self_attn|mlp\."


def group_of(weights: dict[str, Any], stored: str, inputs: Any = None) -> dict[str, Any]:
    return {"weights": weights, "input_activations": inputs, "format": stored}


def int_weights(**changes: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True} | changes


def float_weights(**changes: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True} | changes


INT8_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
FLOAT8_TOKEN = INT8_TOKEN | {"type": "float"}
INT4_GROUPS = int_weights(num_bits=4, strategy="group", group_size=32)

COMPRESSED: list[Any] = [
    pytest.param(group_of(INT4_GROUPS, "pack-quantized"), id="int4-groups"),
    pytest.param(group_of(INT4_GROUPS | {"symmetric": False}, "pack-quantized"), id="int4-zeros"),
    pytest.param(
        group_of(int_weights(num_bits=4, symmetric=False), "pack-quantized"), id="int4-channels"
    ),
    pytest.param(group_of(int_weights(symmetric=False), "pack-quantized"), id="int8-packed-zeros"),
    pytest.param(group_of(int_weights(strategy="tensor"), "pack-quantized"), id="int8-packed"),
    pytest.param(group_of(int_weights(), "int-quantized"), id="int8"),
    pytest.param(group_of(int_weights(symmetric=False), "naive-quantized"), id="int8-zeros"),
    pytest.param(group_of(int_weights(strategy="tensor"), "int-quantized"), id="int8-tensor"),
    pytest.param(group_of(float_weights(), "naive-quantized"), id="float8"),
    pytest.param(group_of(float_weights(strategy="tensor"), "float-quantized"), id="float8-tensor"),
    pytest.param(
        group_of(float_weights(strategy="block", block_structure=[16, 32]), "float-quantized"),
        id="float8-blocks",
    ),
]


def fields_of(group: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": group["format"],
        "config_groups": {"group_0": {"targets": ["Linear"], **group}},
        "ignore": ["lm_head"],
    } | others


def awq_fields(group_size: int, **others: Any) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group_size,
        "zero_point": True,
        "version": "gemm",
    } | others


def gptq_fields(bits: int, group_size: int, **others: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group_size} | others


OTHERS: list[Any] = [
    pytest.param(awq(32), awq_fields(32), LAYERS, id="awq"),
    pytest.param(awq(-1), awq_fields(-1, version="GEMM"), LAYERS, id="awq-channels"),
    pytest.param(
        awq(32), awq_fields(32, modules_to_not_convert=["gate"]), LAYERS, id="awq-part-of-a-name"
    ),
    pytest.param(
        awq(32), awq_fields(32, modules_to_not_convert=["mlp"]), "self_attn", id="awq-in-part"
    ),
    pytest.param(gptq(4, 32), gptq_fields(4, 32, sym=True), LAYERS, id="gptq"),
    pytest.param(gptq(4, 32, sym=False), gptq_fields(4, 32, sym=False), LAYERS, id="gptq-zeros"),
    pytest.param(
        gptq(4, 32, sym=False, v2=True),
        gptq_fields(4, 32, sym=False, checkpoint_format="gptq_v2"),
        LAYERS,
        id="gptq-v2",
    ),
    pytest.param(gptq(8, -1), gptq_fields(8, -1), LAYERS, id="gptq-int8"),
    pytest.param(
        gptq(8, 32, sym=False), gptq_fields(8, 32, sym=False), LAYERS, id="gptq-int8-zeros"
    ),
    pytest.param(
        gptq(4, 32, shuffled=True), gptq_fields(4, 32, desc_act=True), LAYERS, id="gptq-order"
    ),
    pytest.param(
        gptq(4, 32),
        gptq_fields(4, 32, dynamic={r"-:.*\.0\.self_attn": {}}),
        r"\.1\.self_attn|mlp\.",
        id="gptq-dynamic",
    ),
]


def save(path: Path, **changes: Any) -> None:
    save_model(path, "Llama", **(SIZES | changes))


def our_logits(path: Path) -> torch.Tensor:
    """Return the logits after the prompt."""
    runner = ModelRunner.load(path, resolve(path, CONFIG))
    sequence = Sequence(request("a", PROMPT), arrival=0, key=0, max_total_tokens=len(PROMPT) + 1)
    sequence.block_table = list(range(-(-len(PROMPT) // 16)))
    result: torch.Tensor = runner.launch([ScheduledSequence(sequence, len(PROMPT))]).logits[0]
    return result


def differs(path: Path, model: Any) -> float:
    """Return the largest difference of logits, as a share of the largest logit."""
    theirs = reference_logits(model, PROMPT)[-1]
    return float((our_logits(path) - theirs).abs().max() / theirs.abs().max())


def computes_what_it_stands_for(path: Path) -> None:
    model = wide_model(path)
    assert differs(path, model) <= 1e-4
    engine = Engine.load(path, CONFIG)
    engine.add(request("a", PROMPT, max_tokens=8))
    assert tokens_by_request(drain(engine))["a"] == reference_greedy(model, PROMPT, 8)


@pytest.mark.parametrize("group", COMPRESSED)
def test_compressed_tensors(tmp_path: Path, group: dict[str, Any]) -> None:
    save(tmp_path)
    rewrite(tmp_path, {LAYERS: compressed(group)}, fields_of(group))
    computes_what_it_stands_for(tmp_path)


@pytest.mark.parametrize(("write", "fields", "modules"), OTHERS)
def test_awq_and_gptq(tmp_path: Path, write: Writer, fields: dict[str, Any], modules: str) -> None:
    save(tmp_path)
    rewrite(tmp_path, {modules: write}, fields)
    (tmp_path / "quantize_config.json").write_text("{}")
    computes_what_it_stands_for(tmp_path)


def test_a_quantized_head(tmp_path: Path) -> None:
    save(tmp_path, vocab_size=200)
    rewrite(tmp_path, {LINEAR: gptq(4, 32)}, gptq_fields(4, 32, lm_head=True))
    computes_what_it_stands_for(tmp_path)


def test_a_quantized_embedding_is_widened(tmp_path: Path) -> None:
    save(tmp_path, tie_word_embeddings=True)
    group = group_of(int_weights(), "int-quantized", INT8_TOKEN)
    fields = fields_of(group, ignore=["re:model.layers.*"])
    fields["config_groups"]["group_0"]["targets"] = ["Embedding"]
    rewrite(tmp_path, {"embed_tokens": compressed(group)}, fields)
    computes_what_it_stands_for(tmp_path)


def test_biases_stay(tmp_path: Path) -> None:
    save(tmp_path, attention_bias=True, mlp_bias=True)
    group = group_of(INT4_GROUPS, "pack-quantized")
    rewrite(tmp_path, {LAYERS: compressed(group)}, fields_of(group))
    computes_what_it_stands_for(tmp_path)


@pytest.mark.parametrize(
    "group",
    [
        pytest.param(group_of(INT4_GROUPS | {"symmetric": False}, "pack-quantized"), id="int4"),
        pytest.param(group_of(float_weights(), "float-quantized", FLOAT8_TOKEN), id="float8"),
    ],
)
def test_a_checkpoint_that_the_library_saved(tmp_path: Path, group: dict[str, Any]) -> None:
    """The logits equal those of the library itself."""
    model = save_model(tmp_path / "wide", "Llama", **SIZES)
    save_compressed(tmp_path, model, fields_of(group))
    assert differs(tmp_path, wide_model(tmp_path)) >= 1e-2
    assert differs(tmp_path, model) <= 1e-4


def a_token(most: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda rows: rows.abs().amax(-1, keepdim=True) / most


def a_group(rows: torch.Tensor) -> torch.Tensor:
    groups = rows.view(*rows.shape[:-1], -1, 32)
    return (groups.abs().amax(-1) / 448).repeat_interleave(32, -1)


def constant(scale: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda rows: torch.tensor(scale)


INT8_TENSOR = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False}
FLOAT8_GROUP = FLOAT8_TOKEN | {"strategy": "group", "group_size": 32}
BLOCKS = float_weights(strategy="block", block_structure=[16, 32])
W8A8 = group_of(int_weights(), "int-quantized", INT8_TOKEN)
W8A8_STATIC = group_of(int_weights(), "int-quantized", INT8_TENSOR)
FP8 = group_of(float_weights(), "float-quantized", FLOAT8_TOKEN)
FP8_STATIC = group_of(float_weights(), "float-quantized", INT8_TENSOR | {"type": "float"})
FP8_BLOCKS = group_of(BLOCKS, "float-quantized", FLOAT8_GROUP)
FP8_METHOD = {"quant_method": "fp8", "activation_scheme": "dynamic"}
ROUNDED: list[Any] = [
    pytest.param(compressed(W8A8), fields_of(W8A8), True, a_token(127), id="int8-token"),
    pytest.param(
        compressed(W8A8_STATIC), fields_of(W8A8_STATIC), True, constant(4 / 127), id="int8-static"
    ),
    pytest.param(compressed(FP8), fields_of(FP8), False, a_token(448), id="float8-token"),
    pytest.param(
        compressed(FP8_STATIC), fields_of(FP8_STATIC), False, constant(4 / 127), id="float8-static"
    ),
    pytest.param(compressed(FP8_BLOCKS), fields_of(FP8_BLOCKS), False, a_group, id="float8-group"),
    pytest.param(float8(None), FP8_METHOD, False, a_token(448), id="fp8-tensor"),
    pytest.param(float8(None, per_channel=True), FP8_METHOD, False, a_token(448), id="fp8-channel"),
    pytest.param(
        float8(None, static=True),
        FP8_METHOD | {"activation_scheme": "static"},
        False,
        constant(0.01),
        id="fp8-static",
    ),
    pytest.param(
        float8(32), FP8_METHOD | {"weight_block_size": [32, 32]}, False, a_group, id="fp8-blocks"
    ),
]


@pytest.mark.parametrize(("write", "fields", "is_int8", "scales_of"), ROUNDED)
def test_inputs_are_rounded_as_the_checkpoint_asks(
    tmp_path: Path,
    write: Writer,
    fields: dict[str, Any],
    is_int8: bool,
    scales_of: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Rounding is a step: sums in another order sometimes round to another one."""
    save(tmp_path)
    rewrite(tmp_path, {LAYERS: write}, fields)
    model = wide_model(tmp_path)
    exact = differs(tmp_path, model)

    def round_inputs(module: Any, rows: tuple[torch.Tensor]) -> torch.Tensor:
        scales = scales_of(rows[0])
        scaled = rows[0] / scales
        if is_int8:
            return scaled.round().clamp(-128, 127) * scales
        return scaled.clamp(-448, 448).to(torch.float8_e4m3fn).float() * scales

    for layer in model.model.layers:
        for module in layer.modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_pre_hook(round_inputs)
    rounded = differs(tmp_path, model)
    assert rounded <= 0.25 * exact
