"""Errors at load, and the dtype in which a checkpoint is computed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from millrace.engine.models.loader import choose_dtype, load_weights, num_parameters
from millrace.registry.checkpoints.checkpoint import read_model_config
from millrace.schemas.errors import CheckpointError, ConfigError
from tests.engine.checkpoints import save_base_model, save_llama, save_model

CPU = torch.device("cpu")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_llama(tmp_path)
    return tmp_path


def load(path: Path) -> None:
    load_weights(path, read_model_config(path), dtype=torch.float32, device=CPU)


def change_tensors(path: Path, changes: dict[str, torch.Tensor | None]) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, file)


def test_a_missing_tensor_is_named(checkpoint: Path) -> None:
    change_tensors(checkpoint, {"model.layers.1.mlp.up_proj.weight": None})
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load(checkpoint)


def test_a_wrong_shape_is_named_with_both_shapes(checkpoint: Path) -> None:
    change_tensors(checkpoint, {"model.layers.0.self_attn.k_proj.weight": torch.zeros(30, 48)})
    with pytest.raises(CheckpointError, match=r"k_proj.*\[30, 48\].*\[32, 48\]"):
        load(checkpoint)


def test_a_tensor_without_a_place_is_refused(checkpoint: Path) -> None:
    change_tensors(checkpoint, {"model.layers.0.self_attn.q_norm.weight": torch.zeros(16)})
    with pytest.raises(CheckpointError, match="q_norm"):
        load(checkpoint)


def test_a_tied_checkpoint_may_store_its_head_twice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_llama(tmp_path, tie_word_embeddings=True)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    change_tensors(tmp_path, {"lm_head.weight": embedding.clone()})
    load(tmp_path)
    assert not caplog.messages


def test_parts_that_are_ignored_are_logged(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = checkpoint / "config.json"
    fields = json.loads(file.read_text()) | {"auto_map": {"AutoModel": "modeling.Own"}}
    file.write_text(json.dumps(fields))
    load(checkpoint)
    assert "auto_map is ignored" in caplog.text


def test_auto_widens_small_checkpoints_on_the_cpu_only(checkpoint: Path) -> None:
    file = checkpoint / "config.json"
    fields = json.loads(file.read_text()) | {"dtype": "bfloat16"}
    file.write_text(json.dumps(fields))
    small = read_model_config(checkpoint)
    assert choose_dtype(small, "auto", CPU) is torch.float32
    assert choose_dtype(small, "auto", torch.device("cuda")) is torch.bfloat16
    assert choose_dtype(small, "bfloat16", CPU) is torch.bfloat16
    file.write_text(json.dumps(fields | {"vocab_size": 10_000_000}))
    assert choose_dtype(read_model_config(checkpoint), "auto", CPU) is torch.bfloat16
    with pytest.raises(ConfigError, match=re.escape("'int4'")):
        choose_dtype(small, "int4", CPU)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Llama", {}),
        ("Llama", {"tie_word_embeddings": True}),
        ("Mixtral", {"num_local_experts": 3}),
        ("Qwen3Moe", {"num_experts": 3, "num_experts_per_tok": 2, "decoder_sparse_step": 2}),
    ],
)
def test_parameters_are_counted(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    save_model(tmp_path, family, **changes)
    tensors = load_file(tmp_path / "model.safetensors")
    matrices = sum(t.numel() for t in tensors.values() if t.dim() == 2)
    assert num_parameters(read_model_config(tmp_path)) == matrices


def test_parameters_of_a_checkpoint_without_a_head_are_counted(tmp_path: Path) -> None:
    save_base_model(tmp_path, "Qwen3")
    tensors = load_file(tmp_path / "model.safetensors")
    matrices = sum(t.numel() for t in tensors.values() if t.dim() == 2)
    assert num_parameters(read_model_config(tmp_path)) == matrices


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_half_precision_is_widened_without_loss(tmp_path: Path, stored: torch.dtype) -> None:
    save_model(tmp_path, "Llama", stored_dtype=stored)
    config = read_model_config(tmp_path)
    weights = load_weights(tmp_path, config, dtype=torch.float32, device=CPU)
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["model.embed_tokens.weight"].dtype is stored
    assert torch.equal(weights.embedding, tensors["model.embed_tokens.weight"].float())
    assert config.dtype == str(stored).removeprefix("torch.")


def test_a_tied_checkpoint_may_leave_the_prefix_out(tmp_path: Path) -> None:
    """Embedding models that declare themselves language models lack the prefix."""
    model = save_base_model(tmp_path, "Qwen3", tie_word_embeddings=True)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace("Qwen3Model", "Qwen3ForCausalLM"))
    config = read_model_config(tmp_path)
    weights = load_weights(tmp_path, config, dtype=torch.float32, device=CPU)
    assert weights.head is not None
    assert torch.equal(weights.embedding, model.embed_tokens.weight)


def test_a_head_that_is_not_needed_may_be_there(tmp_path: Path) -> None:
    save_model(tmp_path, "Llama")
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace("LlamaForCausalLM", "LlamaModel"))
    config = read_model_config(tmp_path)
    assert load_weights(tmp_path, config, dtype=torch.float32, device=CPU).head is None
