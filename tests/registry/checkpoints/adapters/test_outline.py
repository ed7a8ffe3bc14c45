"""Outline of an adapter from its config and header, and refusals by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from millrace.registry.checkpoints.adapters.outline import (
    WEIGHTS_FILE,
    adapter_version,
    read_adapter_outline,
)
from millrace.registry.checkpoints.checkpoint import ModelConfig
from millrace.registry.checkpoints.families import ExpertsConfig
from millrace.schemas.errors import AdapterError

MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden_size=32,
    vocab_size=50,
    max_position_embeddings=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=48,
)
QUERY = "base_model.model.model.layers.0.self_attn.q_proj"
DOWN = "base_model.model.model.layers.1.mlp.down_proj"

Config = dict[str, Any]
Tensors = dict[str, torch.Tensor]


def _config() -> Config:
    return {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "base_model_name_or_path": "someone/model",
        "target_modules": ["q_proj", "down_proj"],
    }


def _tensors() -> Tensors:
    return {
        f"{QUERY}.lora_A.weight": torch.ones(4, 32),
        f"{QUERY}.lora_B.weight": torch.ones(32, 4),
        f"{DOWN}.lora_A.weight": torch.ones(4, 48),
        f"{DOWN}.lora_B.weight": torch.ones(32, 4),
    }


def _write(folder: Path, config: Config, tensors: Tensors) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / WEIGHTS_FILE)
    return folder


def test_what_an_adapter_has(tmp_path: Path) -> None:
    outline = read_adapter_outline(_write(tmp_path, _config(), _tensors()), MODEL)
    assert outline.rank == 4
    assert outline.base == "someone/model"
    assert outline.targets == ("q_proj", "down_proj")
    assert outline.num_weights == 4 * (32 + 32 + 48 + 32)
    assert [(one.layer, one.scale) for one in outline.matrices] == [(0, 2.0), (1, 2.0)]


def test_names_of_older_versions_and_of_embedding_models(tmp_path: Path) -> None:
    renamed = {
        name.replace("base_model.model.model.", "").replace(".weight", ".default.weight"): tensor
        for name, tensor in _tensors().items()
    }
    outline = read_adapter_outline(_write(tmp_path, _config(), renamed), MODEL)
    assert outline.targets == ("q_proj", "down_proj")


def test_ranks_and_scales_by_patterns(tmp_path: Path) -> None:
    config = _config() | {
        "use_rslora": True,
        "rank_pattern": {r"layers\.0\.self_attn\.q_proj": 9},
        "alpha_pattern": {"q_proj": 6},
    }
    tensors = _tensors() | {
        f"{QUERY}.lora_A.weight": torch.ones(9, 32),
        f"{QUERY}.lora_B.weight": torch.ones(32, 9),
    }
    outline = read_adapter_outline(_write(tmp_path, config, tensors), MODEL)
    assert [(one.rank, one.scale) for one in outline.matrices] == [(9, 2.0), (4, 4.0)]


def test_the_version_is_that_of_the_contents(tmp_path: Path) -> None:
    first = adapter_version(_write(tmp_path / "a", _config(), _tensors()))
    assert adapter_version(_write(tmp_path / "b", _config(), _tensors())) == first
    other = _tensors() | {f"{QUERY}.lora_B.weight": torch.zeros(32, 4)}
    assert adapter_version(_write(tmp_path / "a", _config(), other)) != first
    assert adapter_version(_write(tmp_path / "a", _config() | {"lora_alpha": 9}, other)) != first
    with pytest.raises(AdapterError, match=r"adapter_config\.json cannot be read"):
        adapter_version(tmp_path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"peft_type": None}, "peft_type"),
        ({"use_dora": True}, "use_dora.*merge the adapter"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save.*lm_head"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"target_parameters": ["mlp.experts"]}, "target_parameters"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights.*convert"),
        ({"r": 0}, "r must be a positive integer"),
        ({"r": None}, "r is missing"),
        ({"lora_alpha": "much"}, "lora_alpha"),
        ({"rank_pattern": {"q_proj": "x"}}, "rank_pattern"),
        ({"alpha_pattern": {"q_(": 3}}, "alpha_pattern.*regular expressions"),
        ({"r": 8}, r"shape \[4, 32\], and rank 8"),
        ({"r": 300, "rank_pattern": {}}, "shape"),
    ],
    ids=str,
)
def test_configs_that_are_refused(tmp_path: Path, changes: Config, named: str) -> None:
    folder = _write(tmp_path, _config() | changes, _tensors())
    with pytest.raises(AdapterError, match=named):
        read_adapter_outline(folder, MODEL)


def _named(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensors:
    return {name: torch.ones(*shape).to(dtype)}


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (_named(f"{QUERY}.lora_magnitude_vector", 32), "lora_magnitude_vector is not applied"),
        (_named("base_model.model.lm_head.lora_A.weight", 4, 32), r"lm_head\.lora_A\.weight"),
        (
            _named("base_model.model.model.embed_tokens.lora_embedding_A", 4, 50),
            "embed_tokens.* is not applied",
        ),
        (
            _named("base_model.model.model.layers.0.mlp.experts.1.up_proj.lora_A.weight", 4, 32),
            r"experts\.1",
        ),
        (
            _named("base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight", 4, 32),
            "of layer 7, and the model has 2: the adapter is of another model",
        ),
        (_named(f"{QUERY}.lora_A.weight", 4, 64), r"\[4, 64\].*\[4, 32\].*another model"),
        (_named(f"{QUERY}.lora_A.weight", 4, 32, dtype=torch.int8), "stored as I8"),
        (
            _named("base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight", 4, 32),
            r"k_proj has no lora_B tensor",
        ),
        (_named(f"{QUERY}.lora_A.other.weight", 4, 32), "two adapters of"),
        (
            _named("base_model.model.model.layers.0.mlp.q_proj.lora_A.weight", 4, 32),
            "to no module",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_tensors_that_are_refused(tmp_path: Path, changed: Tensors, named: str) -> None:
    folder = _write(tmp_path, _config(), _tensors() | changed)
    with pytest.raises(AdapterError, match=named):
        read_adapter_outline(folder, MODEL)


def test_a_rank_above_the_bound(tmp_path: Path) -> None:
    folder = _write(tmp_path, _config(), _tensors())
    with pytest.raises(AdapterError, match=r"rank 4, .* up to 3 \(engine\.max_adapter_rank"):
        read_adapter_outline(folder, MODEL, max_rank=3)


def test_an_mlp_where_the_model_has_experts(tmp_path: Path) -> None:
    experts = ExpertsConfig(
        num_experts=2, num_chosen=1, intermediate_size=48, normalized=True, layers=(1,)
    )
    model = ModelConfig(
        **{f: getattr(MODEL, f) for f in MODEL.__struct_fields__} | {"experts": experts}
    )
    with pytest.raises(AdapterError, match=r"layers\.1\.mlp\.down_proj.* mixture of experts"):
        read_adapter_outline(_write(tmp_path, _config(), _tensors()), model)


def _truncate(folder: Path) -> None:
    file = folder / WEIGHTS_FILE
    file.write_bytes(file.read_bytes()[:-10])


def _scribble(folder: Path) -> None:
    (folder / WEIGHTS_FILE).write_bytes(b"not safetensors")


def _lose_weights(folder: Path) -> None:
    (folder / WEIGHTS_FILE).unlink()


def _lose_config(folder: Path) -> None:
    (folder / "adapter_config.json").unlink()


def _break_config(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{")


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (_truncate, WEIGHTS_FILE),
        (_scribble, "truncated or not a safetensors"),
        (_lose_weights, "has no adapter_model"),
        (_lose_config, r"adapter_config\.json cannot be read"),
        (_break_config, "not valid JSON"),
    ],
)
def test_damaged_folders(tmp_path: Path, damage: Callable[[Path], None], named: str) -> None:
    folder = _write(tmp_path, _config(), _tensors())
    damage(folder)
    with pytest.raises(AdapterError, match=named):
        read_adapter_outline(folder, MODEL)
