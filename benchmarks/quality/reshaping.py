"""Checkpoints that compute the function of a Llama with other weights."""

from __future__ import annotations

import json
import shutil
from math import sqrt
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from millrace.registry.checkpoints.checkpoint import ModelConfig, read_model_config

Tensors = dict[str, torch.Tensor]
# K-types of GGUF files have blocks of as many inputs.
_K_BLOCK = 256
_WEIGHTS = "model.safetensors"
_ARCHITECTURE = "LlamaForCausalLM"


def write_permuted(target: Path, checkpoint: Path, seed: int = 0) -> Path:
    """Write a checkpoint whose hidden and intermediate channels have a random order.

    A model that was made of blocks of neighbouring weights has no blocks any more, so that a format
    with such blocks has no advantage on it.
    """
    config, tensors = _read(checkpoint)
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randperm(config.hidden_size, generator=generator)
    for name in [name for name in tensors if name.endswith("norm.weight")]:
        tensors[name] = tensors[name][hidden]
    for name in [name for name in tensors if name.split(".")[-2] in _READS_HIDDEN]:
        tensors[name] = tensors[name][:, hidden]
    for layer in range(config.num_hidden_layers):
        inner = torch.randperm(config.intermediate_size, generator=generator)
        prefix = f"model.layers.{layer}"
        for part in ("gate_proj", "up_proj"):
            name = f"{prefix}.mlp.{part}.weight"
            tensors[name] = tensors[name][inner]
        name = f"{prefix}.mlp.down_proj.weight"
        tensors[name] = tensors[name][:, inner][hidden]
        name = f"{prefix}.self_attn.o_proj.weight"
        tensors[name] = tensors[name][hidden]
    return _write(target, checkpoint, tensors, {})


_READS_HIDDEN = ("embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


def write_widened(target: Path, checkpoint: Path) -> Path:
    """Write a checkpoint whose widths are multiples of 256, by channels and heads of zeros.

    RMSNorm divides by the larger width, so its weight and epsilon make up for it; its weights are
    rounded once more to the checkpoint's dtype.
    """
    config, tensors = _read(checkpoint)
    hidden, inner = _rounded_up(config.hidden_size), _rounded_up(config.intermediate_size)
    group = config.num_attention_heads // config.num_key_value_heads
    kv_heads = config.num_key_value_heads
    while kv_heads * group * config.head_dim % _K_BLOCK:
        kv_heads += 1
    keys, queries = kv_heads * config.head_dim, kv_heads * group * config.head_dim
    sizes = {
        "embed_tokens": (config.vocab_size, hidden),
        "lm_head": (config.vocab_size, hidden),
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }
    share = config.hidden_size / hidden
    for name, tensor in tensors.items():
        if tensor.dim() == 1:
            wide = tensor.new_zeros(hidden)
            wide[: len(tensor)] = (tensor.double() * sqrt(share)).to(tensor.dtype)
        else:
            wide = tensor.new_zeros(sizes[name.split(".")[-2]])
            wide[: tensor.shape[0], : tensor.shape[1]] = tensor
        tensors[name] = wide
    changes: dict[str, object] = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": kv_heads * group,
        "num_key_value_heads": kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps * share,
    }
    return _write(target, checkpoint, tensors, changes)


def _rounded_up(width: int) -> int:
    return -(-width // _K_BLOCK) * _K_BLOCK


def _read(checkpoint: Path) -> tuple[ModelConfig, Tensors]:
    """Read a Llama of one file. Raises ValueError for another architecture."""
    config = read_model_config(checkpoint)
    if config.architecture != _ARCHITECTURE:
        raise ValueError(f"{checkpoint} is a {config.architecture}, not a {_ARCHITECTURE}")
    return config, load_file(checkpoint / _WEIGHTS)


def _write(target: Path, checkpoint: Path, tensors: Tensors, changes: dict[str, object]) -> Path:
    shutil.copytree(checkpoint, target, ignore=shutil.ignore_patterns(_WEIGHTS))
    file = target / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes, indent=2) + "\n")
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, target / _WEIGHTS, metadata={"format": "pt"})
    return target
