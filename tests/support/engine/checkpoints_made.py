"""Tiny checkpoints with random weights, complete enough to be served."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.support.engine.tokenizers_made import CHAT_TEMPLATE, byte_level, write_tokenizer

CONTEXT_WINDOW_TOKENS = 128


def write_catalogue(folder: Path, name: str, *tiers: str) -> Path:
    """A models.yaml in ``folder`` with one small model, for these service tiers."""
    write_checkpoint(folder / name)
    file = folder / "models.yaml"
    file.write_text(f"models:\n  {name}:\n    source: ./{name}\n    tiers: [{', '.join(tiers)}]\n")
    return file


def write_checkpoint(
    path: Path,
    *,
    chat_template: str | None = CHAT_TEMPLATE,
    special_tokens: Sequence[str] = (),
    **changes: Any,
) -> Path:
    """A two-layer Llama in ``path`` with a byte-level tokenizer that has further
    ``special_tokens``; ``changes`` go to config.json. A classifier has a head for as many labels
    as ``num_labels`` says."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_level()
    tokenizer.add_special_tokens(list(special_tokens))
    template = {} if chat_template is None else {"chat_template": chat_template}
    write_tokenizer(path, tokenizer, **template)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": CONTEXT_WINDOW_TOKENS,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": True,
        "dtype": "float32",
    } | changes
    (path / "config.json").write_text(json.dumps(config))
    save_file(_weights(config), path / "model.safetensors")
    return path


def _weights(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, middle = config["hidden_size"], config["intermediate_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        attention, mlp = f"layers.{layer}.self_attn", f"layers.{layer}.mlp"
        shapes |= {
            f"{attention}.q_proj": (hidden, hidden),
            f"{attention}.k_proj": (kv, hidden),
            f"{attention}.v_proj": (kv, hidden),
            f"{attention}.o_proj": (hidden, hidden),
            f"{mlp}.gate_proj": (middle, hidden),
            f"{mlp}.up_proj": (middle, hidden),
            f"{mlp}.down_proj": (hidden, middle),
            f"layers.{layer}.input_layernorm": (hidden,),
            f"layers.{layer}.post_attention_layernorm": (hidden,),
        }
    shapes["norm"] = (hidden,)
    weights = {
        f"model.{name}.weight": torch.randn(shape, generator=generator) * 0.2
        if len(shape) > 1
        else torch.ones(shape)
        for name, shape in shapes.items()
    }
    if config["architectures"][0].endswith("ForSequenceClassification"):
        shape = (config["num_labels"], hidden)
        weights["score.weight"] = torch.randn(shape, generator=generator) * 0.2
    return weights
