"""Stages of a model in sequence: together they compute the same as the whole model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from millrace.engine.adapters.rows import AdapterWeights, PlainAdapter
from millrace.engine.adapters.weights import read_adapter_weights
from millrace.engine.models.decoder import Decoder, DecoderWeights
from millrace.engine.models.dummy import DummyTensors
from millrace.engine.quantization.rounding import quantize_at_load
from millrace.registry.checkpoints.adapters.outline import read_adapter_outline
from millrace.registry.checkpoints.checkpoint import read_model_config
from millrace.registry.checkpoints.shard import Shard, stage_layers
from millrace.schemas.errors import CheckpointError
from tests.engine.adapters.saved import ALL_TARGETS, save_adapter
from tests.engine.checkpoints import save_base_model, save_classifier, save_model
from tests.engine.models.ranks import CPU, logits_of, weights_of
from tests.engine.models.test_shards import EXPERTS, SIZES, same_logits
from tests.engine.quantization.test_formats import awq_fields, gptq_fields
from tests.engine.quantization.written import awq, gptq, rewrite

FOUR_LAYERS = SIZES | {"num_hidden_layers": 4}
# Of each size of a stage's group so many stages.
SPLITS = pytest.mark.parametrize(("size", "num_stages"), [(1, 2), (1, 3), (2, 2)])
WINDOWS: dict[str, Any] = {
    "use_sliding_window": True,
    "sliding_window": 7,
    "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
}


def same_as_whole(path: Path, size: int, num_stages: int, **options: Any) -> torch.Tensor:
    """Compare the logits of stages with those of the whole model; return the latter."""
    same_bits(path, size, num_stages, **options)
    whole = logits_of(path, **options)
    same_logits(logits_of(path, size=size, **options), whole)
    return whole


def same_bits(path: Path, size: int, num_stages: int, **options: Any) -> None:
    """Assert the bits of a model of one stage over as many ranks, whose sums have the same
    order."""
    ours = logits_of(path, size=size, num_stages=num_stages, **options)
    assert torch.equal(ours, logits_of(path, size=size, **options))


@SPLITS
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        pytest.param("Llama", {}, id="llama"),
        pytest.param("Llama", {"tie_word_embeddings": True}, id="tied"),
        pytest.param("Llama", {"attention_bias": True, "mlp_bias": True}, id="biases"),
        pytest.param("Qwen2", {}, id="qwen2-biases"),
        pytest.param("Qwen3", WINDOWS, id="qwen3-windows-of-some-layers"),
        pytest.param("Mistral", {"sliding_window": 7}, id="mistral-windows"),
    ],
)
def test_dense_models(
    tmp_path: Path, family: str, changes: dict[str, Any], size: int, num_stages: int
) -> None:
    save_model(tmp_path, family, **(FOUR_LAYERS | changes))
    same_as_whole(tmp_path, size, num_stages)


@SPLITS
@pytest.mark.parametrize("splits_experts", [False, True], ids=["slices", "whole-experts"])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        pytest.param("Mixtral", {}, id="mixtral"),
        pytest.param("Qwen3Moe", {"decoder_sparse_step": 2}, id="beside-dense"),
        pytest.param("Qwen3Moe", {"mlp_only_layers": [0, 1, 2]}, id="behind-dense"),
    ],
)
def test_mixtures(
    tmp_path: Path,
    family: str,
    changes: dict[str, Any],
    splits_experts: bool,
    size: int,
    num_stages: int,
) -> None:
    save_model(tmp_path, family, **(FOUR_LAYERS | EXPERTS | changes))
    same_bits(tmp_path, size, num_stages, splits_experts=splits_experts)
    ours = logits_of(tmp_path, size=size, splits_experts=splits_experts, num_stages=num_stages)
    same_logits(ours, logits_of(tmp_path))


@SPLITS
@pytest.mark.parametrize(
    ("write", "fields", "modules"),
    [
        pytest.param(gptq(4, 32), gptq_fields(4, 32), r"self_attn|mlp\.", id="gptq"),
        pytest.param(awq(32), awq_fields(32), r"self_attn|mlp\.", id="awq"),
        pytest.param(
            gptq(4, 32),
            gptq_fields(4, 32, lm_head=True),
            r"self_attn|mlp\.|lm_head",
            id="gptq-with-head",
        ),
    ],
)
def test_quantized_models(
    tmp_path: Path, write: Any, fields: dict[str, Any], modules: str, size: int, num_stages: int
) -> None:
    save_model(tmp_path, "Llama", **(FOUR_LAYERS | {"vocab_size": 256}))
    rewrite(tmp_path, {modules: write}, fields)
    same_as_whole(tmp_path, size, num_stages)


@SPLITS
@pytest.mark.parametrize("is_tied", [False, True])
def test_weights_quantized_at_load(
    tmp_path: Path, is_tied: bool, size: int, num_stages: int
) -> None:
    """Rows are rounded, too, so that sums in another order may differ by a step."""
    save_model(tmp_path, "Llama", **(FOUR_LAYERS | {"tie_word_embeddings": is_tied}))
    at_load = quantize_at_load("int8")
    makers = {"quantize": at_load.layers, "quantize_head": at_load.head}
    same_bits(tmp_path, size, num_stages, **makers)


@SPLITS
@pytest.mark.parametrize(
    ("family", "changes", "targets"),
    [
        pytest.param("Llama", {}, ALL_TARGETS, id="llama"),
        pytest.param("Qwen3Moe", EXPERTS, ALL_TARGETS[:4], id="beside-experts"),
    ],
)
def test_adapters(
    tmp_path: Path,
    family: str,
    changes: dict[str, Any],
    targets: tuple[str, ...],
    size: int,
    num_stages: int,
) -> None:
    base = tmp_path / "base"
    save_adapter(
        tmp_path / "one", save_model(base, family, **(FOUR_LAYERS | changes)), targets=targets
    )
    config = read_model_config(base)
    outline = read_adapter_outline(tmp_path / "one", config)

    def read(shard: Shard) -> AdapterWeights:
        layers = read_adapter_weights(outline, config, torch.float32, shard)
        assert len(layers) == len(stage_layers(config, shard))
        return PlainAdapter(layers)

    whole = same_as_whole(base, size, num_stages, adapters=read)
    assert float((whole - logits_of(base)).abs().max()) > 0.1


@SPLITS
def test_random_weights_are_those_of_the_whole(tmp_path: Path, size: int, num_stages: int) -> None:
    changes = {"decoder_sparse_step": 2, "tie_word_embeddings": True}
    save_model(tmp_path, "Qwen3Moe", **(FOUR_LAYERS | EXPERTS | changes))
    same_as_whole(tmp_path, size, num_stages, source=partial(DummyTensors, torch.float32, CPU))


@SPLITS
def test_bfloat16(tmp_path: Path, size: int, num_stages: int) -> None:
    """The next stage receives the same values that the whole model would go on with."""
    save_model(tmp_path, "Llama", **FOUR_LAYERS)
    same_bits(tmp_path, size, num_stages, dtype=torch.bfloat16)


def test_a_checkpoint_for_labels(tmp_path: Path) -> None:
    save_classifier(tmp_path, "Qwen3", num_labels=3, **FOUR_LAYERS)

    def labels(decoder: Decoder[Any, Any], hidden: torch.Tensor) -> torch.Tensor:
        return decoder.labels(decoder.normed(hidden))

    assert same_as_whole(tmp_path, 1, 2, behind=labels).shape[1] == 3


def test_a_checkpoint_for_embeddings_whose_tensors_lack_the_prefix(tmp_path: Path) -> None:
    save_base_model(tmp_path, "Qwen3", **FOUR_LAYERS)
    assert same_as_whole(tmp_path, 1, 3, behind=Decoder.normed).shape[1] == 64


@pytest.mark.parametrize("is_other", [False, True])
def test_a_tied_checkpoint_that_stores_a_head(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_other: bool
) -> None:
    save_model(tmp_path, "Llama", **(FOUR_LAYERS | {"tie_word_embeddings": True}))
    head = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"].clone()
    add_tensors(tmp_path, {"lm_head.weight": head * 2.0 if is_other else head})
    same_as_whole(tmp_path, 1, 2)
    assert ("tie_word_embeddings is ignored" in caplog.text) is is_other


def stage_weights(path: Path, num_stages: int) -> list[DecoderWeights]:
    return [
        weights_of(path, Shard(stage=stage, num_stages=num_stages), None, dtype=torch.bfloat16)
        for stage in range(num_stages)
    ]


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_stage_has_its_part_alone(tmp_path: Path, is_tied: bool) -> None:
    save_model(tmp_path, "Llama", **(FOUR_LAYERS | {"tie_word_embeddings": is_tied}))
    config, stages = read_model_config(tmp_path), stage_weights(tmp_path, 3)
    for stage, weights in enumerate(stages):
        assert weights.dtype is torch.bfloat16
        assert weights.embedding.device == CPU
        assert len(weights.layers) == len(
            stage_layers(config, Shard(stage=stage, num_stages=len(stages)))
        )
    assert [tuple(own.embedding.shape) for own in stages] == [
        (config.vocab_size, 64),
        (0, 64),
        (0, 64),
    ]
    assert [tuple(own.final_norm.shape) for own in stages] == [(0,), (0,), (64,)]
    assert [own.head is None for own in stages] == [True, True, False]


def test_each_stage_checks_its_own_tensors(tmp_path: Path) -> None:
    save_model(tmp_path, "Llama", **FOUR_LAYERS)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.3.mlp.down_proj.weight"
    first, last = Shard(stage=0, num_stages=2), Shard(stage=1, num_stages=2)
    for changed, words in [
        ({name: torch.zeros(64, 96)}, r"down_proj.*\[64, 96\].*\[64, 128\]"),
        ({f"{name}_extra": torch.zeros(1)}, r"1 tensors .*layers\.3\.mlp\.down_proj"),
        ({"lm_head.weight": torch.zeros(1, 64)}, r"lm_head.*\[1, 64\]"),
    ]:
        save_file(tensors | changed, file)
        weights_of(tmp_path, first, None)
        with pytest.raises(CheckpointError, match=words):
            weights_of(tmp_path, last, None)


def test_a_layer_too_many_is_refused_by_every_stage(tmp_path: Path) -> None:
    save_model(tmp_path, "Llama", **FOUR_LAYERS)
    add_tensors(tmp_path, {"model.layers.4.mlp.down_proj.weight": torch.zeros(64, 128)})
    for stage in range(2):
        with pytest.raises(CheckpointError, match=r"1 tensors .*layers\.4\.mlp"):
            weights_of(tmp_path, Shard(stage=stage, num_stages=2), None)


def add_tensors(path: Path, more: dict[str, torch.Tensor]) -> None:
    file = path / "model.safetensors"
    save_file(load_file(file) | more, file)
