"""EAGLE-3 heads: published layouts load and follow the definition; other layouts are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from millrace.engine.devices.cpu.eagle_head import HeadRunner
from millrace.engine.devices.cpu.runner import ModelRunner
from millrace.engine.scheduling.schedule import ScheduledSequence
from millrace.engine.step.features import Features, HeadInputs
from millrace.engine.step.sequence import Sequence
from millrace.registry.checkpoints.checkpoint import ModelConfig, read_model_config
from millrace.registry.checkpoints.eagle_head import read_eagle_head
from millrace.schemas.errors import CheckpointError, ConfigError
from tests.engine.checkpoints import save_llama
from tests.engine.eagle_heads import HEAD, Tensors, head_tensors, reference_logits, save_head
from tests.engine.support import prompt, request, resolved

_NUM_LAYERS = 3
_TARGET: dict[str, Any] = {
    "vocab_size": HEAD["vocab_size"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": _NUM_LAYERS,
    "max_position_embeddings": 2048,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    save_llama(path, **_TARGET, stored_dtype=torch.bfloat16)
    return path


@pytest.fixture(scope="module")
def target_config(target: Path) -> ModelConfig:
    return read_model_config(target)


def _runner(target: Path) -> ModelRunner:
    return ModelRunner.load(
        target,
        resolved(target, device="cpu", dtype="bfloat16", kernels="native", num_blocks=64),
    )


def _load_head(head: Path, target: Path) -> HeadRunner:
    runner = _runner(target)
    return HeadRunner.load(head, runner, runner.embedding)


def _sequence(token_ids: list[int], num_blocks: int = 8) -> Sequence:
    one = Sequence(request("r", token_ids, max_tokens=40), arrival=0, key=1, max_total_tokens=2000)
    one.block_table = list(range(3, 3 + num_blocks))
    return one


def _embedding(target: Path) -> torch.Tensor:
    return load_file(target / "model.safetensors")["model.embed_tokens.weight"]


def _layout(changes: dict[str, Any], **more: Any) -> tuple[dict[str, Any], Tensors]:
    config = {name: value for name, value in (HEAD | changes).items() if value is not None}
    return config, head_tensors(config, **more)


def _with_embedding() -> tuple[dict[str, Any], Tensors]:
    config, tensors = _layout({})
    noise = torch.randn(config["vocab_size"], 64, generator=torch.Generator().manual_seed(2))
    return config, tensors | {"embed_tokens.weight": noise.bfloat16()}


def _narrow() -> tuple[dict[str, Any], Tensors]:
    """Save a head with another hidden size than the target's, and thus its own embedding."""
    config, tensors = _layout({"hidden_size": 32, "target_hidden_size": 64})
    noise = torch.randn(config["vocab_size"], 32, generator=torch.Generator().manual_seed(2))
    return config, tensors | {"embed_tokens.weight": noise.bfloat16()}


def _whole_vocabulary() -> tuple[dict[str, Any], Tensors]:
    config, tensors = _layout({"draft_vocab_size": HEAD["vocab_size"]})
    del config["draft_vocab_size"], tensors["d2t"], tensors["t2d"]
    return config, tensors


def _another_order() -> tuple[dict[str, Any], Tensors]:
    size = HEAD["vocab_size"]
    config, tensors = _layout({"draft_vocab_size": size})
    return config, tensors | {"d2t": torch.arange(size).flip(0) - torch.arange(size)}


_LAYOUTS = {
    "another order": _another_order(),
    "midlayer": _layout({}),
    "layers.0": _layout({"architectures": ["Eagle3LlamaForCausalLM"]}, prefix="layers.0."),
    "an older name": _layout({"architectures": ["LlamaForCausalLM"]}),
    "embedding": _with_embedding(),
    "narrow": _narrow(),
    "whole vocabulary": _whole_vocabulary(),
    "normed residual": _layout({"norm_before_residual": True}),
    "into layers": _layout({"eagle_config": None, "eagle_aux_hidden_state_layer_ids": [0, 1, 3]}),
}


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_a_head_computes_what_the_definition_says(
    target: Path, tmp_path: Path, layout: str
) -> None:
    config, tensors = _LAYOUTS[layout]
    save_head(tmp_path / "head", config, tensors)
    runner = _runner(target)
    head = HeadRunner.load(tmp_path / "head", runner, runner.embedding)
    token_ids = prompt(4, 75, 400)
    one = _sequence(token_ids)
    for num_tokens in (40, 20, 15):
        runner.launch([ScheduledSequence(one, num_tokens)])
        one.num_computed_tokens += num_tokens
    assert isinstance(one.features, Features)
    assert (one.features.begin, one.features.end) == (0, 75)
    features = one.features.rows(0, 75)

    # The token that comes, then three that the head says itself.
    copy = _sequence([*token_ids, 17])
    copy.features = HeadInputs(one.features, 1)
    copy.num_computed_tokens = 1
    head.launch([ScheduledSequence(copy, 33)])
    copy.num_computed_tokens = 34
    logits = []
    for token in (17, 91, 230, 5):
        if copy.token_ids[-1] != token:
            copy.token_ids.append(token)
        num_tokens = copy.num_uncomputed_tokens
        step = head.launch([ScheduledSequence(copy, num_tokens)])
        assert step.by_host == [copy]
        logits.append(step.logits[0].float())
        copy.num_computed_tokens += num_tokens

    wanted = reference_logits(
        config,
        tensors,
        _embedding(target),
        copy.token_ids[1:],
        features,
        num_drafted=3,
    )[-4:]
    size = config.get("draft_vocab_size", config["vocab_size"])
    d2t = tensors.get("d2t", torch.zeros(size, dtype=torch.int64))
    for told, known in zip(logits, wanted, strict=True):
        assert told.shape == (config["vocab_size"],)
        assert int(told.isfinite().sum()) == size
        own = told[torch.arange(size) + d2t]
        torch.testing.assert_close(own, known, rtol=0.1, atol=0.05 * known.abs().max().item())
        assert torch.nn.functional.cosine_similarity(own, known, dim=0) > 0.999


@pytest.mark.parametrize("layers", [(0, 1, 2), (1, 2, 3), (3, 3, 0)])
def test_features_are_the_hidden_states_between_the_layers(
    tmp_path: Path, layers: tuple[int, ...]
) -> None:
    model = save_llama(tmp_path, **_TARGET, stored_dtype=torch.bfloat16)
    runner = _runner(tmp_path)
    runner.keep_features(layers)
    token_ids = prompt(5, 40, 400)
    one = _sequence(token_ids)
    for num_tokens in (30, 1, 9):
        runner.launch([ScheduledSequence(one, num_tokens)])
        one.num_computed_tokens += num_tokens
    between: dict[int, torch.Tensor] = {}
    for number, layer in enumerate(model.model.layers):
        layer.register_forward_hook(
            lambda _, inputs, output, number=number: between.update(
                {
                    number: inputs[0][0],
                    number + 1: (output[0] if isinstance(output, tuple) else output).reshape(
                        -1, 64
                    ),
                }
            )
        )
    with torch.inference_mode():
        model(torch.tensor([token_ids]))
    told = one.features.rows(0, 40).float().unflatten(1, (len(layers), -1))
    wanted = torch.stack([between[layer] for layer in layers], 1)
    alike = torch.nn.functional.cosine_similarity(told, wanted, dim=-1)
    # Rows in bfloat16 beside rows in float32; those of another layer are at 0.9.
    assert alike.min() > 0.99
    assert alike.mean() > 0.999


def test_layers_are_low_middle_and_high_unless_named(tmp_path: Path) -> None:
    config, tensors = _layout({"eagle_config": None})
    save_head(tmp_path / "head", config, tensors)
    save_llama(tmp_path / "deep", **_TARGET | {"num_hidden_layers": 9})
    head, _ = read_eagle_head(tmp_path / "head", read_model_config(tmp_path / "deep"))
    assert head.feature_layers == (2, 4, 6)
    # Trained on short texts, and computed on long ones.
    assert head.context_window_tokens == 2048 > HEAD["max_position_embeddings"]


_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "medusa": ({"architectures": ["MedusaModel"]}, "MedusaModel is not an EAGLE-3 head"),
    "mtp": ({"architectures": ["DeepSeekMTPModel"]}, "DeepSeekMTPModel is not an EAGLE-3 head"),
    "speculators": ({"architectures": ["Eagle3Speculator"]}, "Eagle3Speculator is not an EAGLE-3"),
    "nothing": ({"architectures": None}, "field architectures is missing"),
    "several layers": ({"num_hidden_layers": 2}, "field num_hidden_layers must be 1"),
    "a window": ({"sliding_window": 512}, "field sliding_window must be null"),
    "no features": (
        {"eagle_config": {"use_aux_hidden_state": False}},
        "field eagle_config.use_aux_hidden_state must be true",
    ),
    "no last norm": (
        {"eagle_config": {"use_last_layernorm": False}},
        "field eagle_config.use_last_layernorm must be true",
    ),
    "another norm": (
        {"eagle_config": {"use_mtp_layernorm": True}},
        "field eagle_config.use_mtp_layernorm must be false",
    ),
    "several at once": (
        {"eagle_config": {"parallel_draft_step": 2}},
        "field eagle_config.parallel_draft_step must be 1",
    ),
    "vocabulary": ({"vocab_size": 500}, "field vocab_size must be 448, the model's vocab_size"),
    "width": ({"target_hidden_size": 96}, "field target_hidden_size must be 64"),
    "width unsaid": ({"hidden_size": 96}, "field hidden_size must be 64, the model's hidden_size"),
    "too deep": (
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}},
        "eagle_config.eagle_aux_hidden_state_layer_ids must be 3 layers of the model's 3",
    ),
    "two features": (
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]}},
        "must be 3 layers of the model's 3",
    ),
    "a shallow target": ({"eagle_config": None}, "given, as the model has 3 layers only"),
    "draft vocabulary": ({"draft_vocab_size": 449}, "draft_vocab_size must be at most vocab_size"),
    "quantized": (
        {"quantization_config": {"quant_method": "fp8"}},
        "field quantization_config must be absent",
    ),
    "dynamic": (
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        "field rope_scaling must be of a kind other than",
    ),
}


@pytest.mark.parametrize("kind", _REFUSED)
def test_another_config_is_refused_by_name(
    target_config: ModelConfig, tmp_path: Path, kind: str
) -> None:
    changes, sentence = _REFUSED[kind]
    config = {name: value for name, value in (HEAD | changes).items() if value is not None}
    save_head(tmp_path, config, head_tensors(HEAD))
    with pytest.raises(CheckpointError) as refusal:
        read_eagle_head(tmp_path, target_config)
    assert sentence in str(refusal.value)


def _without(name: str) -> Tensors:
    tensors = head_tensors(HEAD)
    del tensors[name]
    return tensors


_WRONG_IDS = torch.zeros(HEAD["draft_vocab_size"], dtype=torch.int64)
_WRONG_IDS[0] = 1
_TENSORS: dict[str, tuple[Tensors, str]] = {
    "eagle 1": (_without("midlayer.hidden_norm.weight"), "has no tensor midlayer.hidden_norm"),
    "no fusion": (_without("fc.weight"), "Tensor fc.weight is missing"),
    "no head": (_without("lm_head.weight"), "Tensor lm_head.weight is missing"),
    "no map": (_without("d2t"), "Tensor d2t is missing"),
    "no norm": (_without("norm.weight"), "Tensor norm.weight is missing"),
    "narrow attention": (
        head_tensors(HEAD) | {"midlayer.self_attn.q_proj.weight": torch.zeros(128, 64)},
        "midlayer.self_attn.q_proj.weight in",
    ),
    "a bias": (head_tensors(HEAD) | {"fc.bias": torch.zeros(64)}, "does not account for: fc.bias"),
    "another layer": (
        head_tensors(HEAD) | {"layers.1.input_layernorm.weight": torch.zeros(64)},
        "does not account for: layers.1.input_layernorm.weight",
    ),
    "one token twice": (head_tensors(HEAD) | {"d2t": _WRONG_IDS}, "Tensor d2t of"),
    "tokens behind": (
        head_tensors(HEAD) | {"d2t": torch.full((HEAD["draft_vocab_size"],), 400)},
        "Tensor d2t of",
    ),
    "words as floats": (
        head_tensors(HEAD) | {"d2t": torch.zeros(HEAD["draft_vocab_size"])},
        "is stored as F32",
    ),
}


@pytest.mark.parametrize("kind", _TENSORS)
def test_other_tensors_are_refused_by_name(target: Path, tmp_path: Path, kind: str) -> None:
    tensors, sentence = _TENSORS[kind]
    save_head(tmp_path, HEAD, tensors)
    with pytest.raises(CheckpointError) as refusal:
        _load_head(tmp_path, target)
    assert sentence in str(refusal.value)


def test_a_narrow_head_needs_an_embedding_of_its_own(target: Path, tmp_path: Path) -> None:
    config, tensors = _narrow()
    del tensors["embed_tokens.weight"]
    save_head(tmp_path, config, tensors)
    with pytest.raises(CheckpointError, match=r"Tensor embed_tokens\.weight is missing"):
        _load_head(tmp_path, target)


def test_a_shape_that_the_kernels_do_not_have_is_refused(target: Path, tmp_path: Path) -> None:
    config, tensors = _layout({"head_dim": 16})
    save_head(tmp_path, config, tensors)
    with pytest.raises(ConfigError, match="heads of 16"):
        _load_head(tmp_path, target)


def test_pickled_tensors_are_refused(target_config: ModelConfig, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HEAD))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="safetensors"):
        read_eagle_head(tmp_path, target_config)


def test_a_whole_model_is_no_head(target: Path, target_config: ModelConfig, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((target / "config.json").read_text())
    save_file(load_file(target / "model.safetensors"), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="or a whole model; take an EAGLE-3 head"):
        read_eagle_head(tmp_path, target_config)
