"""Inputs of a calibration, compared with transformers' values behind the quantized layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from millrace.engine.quantization.rounding import rounded_int4
from millrace.engine.quantizer.calibration import MAX_TEXT_TOKENS, CalibratedLayers
from millrace.engine.quantizer.checkpoint import Recipe, quantize_checkpoint
from millrace.engine.quantizer.gptq import gptq_int4
from millrace.engine.quantizer.schemes import QuantizerScheme
from millrace.registry.checkpoints.checkpoint import open_tensors, read_model_config
from tests.engine.checkpoints import reference_logits, save_base_model, save_model
from tests.engine.support import prompt

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3}
TEXTS = [prompt(seed, 1 + 9 * seed) for seed in range(12)]


class Seen:
    """Sums of x x^T over the inputs of each linear map of a layer in transformers' model."""

    def __init__(self, layer: Any) -> None:
        self.sums: dict[str, torch.Tensor] = {}
        self._handles = [
            module.register_forward_pre_hook(self._hook(name))
            for name, module in layer.named_modules()
            if isinstance(module, torch.nn.Linear)
        ]

    def _hook(self, name: str) -> Callable[[Any, tuple[torch.Tensor]], None]:
        def see(_: Any, inputs: tuple[torch.Tensor]) -> None:
            rows = inputs[0].detach().flatten(0, -2)
            self.sums[name] = self.sums.get(name, 0) + rows.t() @ rows

        return see

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Llama", {}),
        ("Qwen2", {}),
        ("Qwen3", {"rope_theta": 50_000.0}),
        ("Mistral", {"sliding_window": 16}),
    ],
)
def test_each_layer_sees_what_the_quantized_ones_before_it_make(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    model = save_model(tmp_path, family, **(SHAPE | changes))
    index, config = open_tensors(tmp_path), read_model_config(tmp_path)
    layers = CalibratedLayers(index, config, "model.", TEXTS, CPU)
    for number, layer in enumerate(model.model.layers):
        made = layers.quantized(number, group_inputs=32, scale_dtype=torch.float32)
        seen = Seen(layer)
        for text in TEXTS:
            reference_logits(model, text)
        seen.stop()
        assert set(made) == {f"model.layers.{number}.{name}.weight" for name in seen.sums}
        for name, hessian in seen.sums.items():
            module = layer.get_submodule(name)
            expected = gptq_int4(module.weight.detach(), hessian, group_inputs=32)
            given = made[f"model.layers.{number}.{name}.weight"]
            # What falls between two codes moves what makes up for it.
            assert (given.codes == expected.codes).float().mean() > 0.95
            torch.testing.assert_close(given.scales, expected.scales)
            module.weight.data = given.values()


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 1}),
        (
            "Qwen3Moe",
            {
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 64,
                "mlp_only_layers": [1],
            },
        ),
    ],
)
def test_experts_are_calibrated_by_the_tokens_that_choose_them(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    save_model(tmp_path, family, **(SHAPE | changes))
    index, config = open_tensors(tmp_path), read_model_config(tmp_path)
    layers = CalibratedLayers(index, config, "model.", TEXTS, CPU)
    tensors = load_file(tmp_path / "model.safetensors")
    for number in range(3):
        made = layers.quantized(number, group_inputs=32, scale_dtype=torch.float32)
        assert config.experts is not None
        num_mlps = 4 if number in config.experts.layers else 1
        assert len(made) == 4 + 3 * num_mlps
        for name, weight in made.items():
            plain = rounded_int4(tensors[name], group_inputs=32)
            assert weight.codes.shape == plain.codes.shape
            assert not torch.equal(weight.codes, plain.codes)
            assert (weight.values() - tensors[name]).norm() < 0.5 * tensors[name].norm()


def test_an_expert_that_no_token_chooses_is_rounded_to_nearest(tmp_path: Path) -> None:
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 1}
    save_model(tmp_path, "Mixtral", **(SHAPE | sizes))
    index, config = open_tensors(tmp_path), read_model_config(tmp_path)
    layers = CalibratedLayers(index, config, "model.", [[7]], CPU)
    made = layers.quantized(0, group_inputs=32, scale_dtype=torch.float32)
    tensors = load_file(tmp_path / "model.safetensors")
    plain = [
        torch.equal(weight.codes, rounded_int4(tensors[name], group_inputs=32).codes)
        for name, weight in made.items()
        if name.endswith("w1.weight")
    ]
    assert sorted(plain) == [False, True, True, True]


def test_a_calibrated_checkpoint_is_closer_to_the_wide_one(tmp_path: Path) -> None:
    """The comparison takes the layers' outputs for texts of another draw; the embedding has few
    directions, as trained ones do."""
    model = save_model(tmp_path / "wide", "Llama", **SHAPE)
    turned = torch.randn(96, 96, generator=torch.Generator().manual_seed(1))
    narrow = torch.diag(torch.logspace(0, -2, 96)) @ turned
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        embedding.copy_(embedding @ narrow)
        for parameter in model.model.layers.parameters():
            if parameter.dim() == 2:
                parameter *= 0.3
    model.save_pretrained(tmp_path / "wide")
    held_out = prompt(99, 200)
    plain = reference_logits(model, held_out)
    errors = []
    for name, texts in (("nearest", None), ("calibrated", [prompt(s, 200) for s in range(20)])):
        quantize_checkpoint(
            tmp_path / "wide", tmp_path / name, Recipe(QuantizerScheme.W4A16, texts=texts), CPU
        )
        made = type(model).from_pretrained(tmp_path / name, dtype=torch.float32).eval()
        errors.append(float((reference_logits(made, held_out) - plain).norm()))
    nearest, calibrated = errors
    assert calibrated < 0.7 * nearest


def test_long_texts_are_cut_and_a_model_for_embeddings_can_be_calibrated(tmp_path: Path) -> None:
    save_base_model(tmp_path / "wide", "Qwen3", **(SHAPE | {"max_position_embeddings": 4096}))
    made = []
    for name, length in (("long", MAX_TEXT_TOKENS + 300), ("cut", MAX_TEXT_TOKENS)):
        recipe = Recipe(QuantizerScheme.W4A16, texts=[prompt(1, 2000)[:length], [], prompt(2, 5)])
        quantize_checkpoint(tmp_path / "wide", tmp_path / name, recipe, CPU)
        made.append((tmp_path / name / "model.safetensors").read_bytes())
    assert made[0] == made[1]
