"""Small adapter folders made without PEFT, for tests that do not compute with them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from millrace.registry.checkpoints.adapters.config import CONFIG_FILE
from millrace.registry.checkpoints.adapters.outline import WEIGHTS_FILE
from millrace.registry.checkpoints.checkpoint import ModelConfig


def write_adapter(folder: Path, model: ModelConfig, *, rank: int = 2, seed: int = 0) -> Path:
    """An adapter of the first layer's queries."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 4}
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    generator = torch.Generator().manual_seed(seed)
    queries = model.num_attention_heads * model.head_dim
    save_file(
        {
            f"{module}.lora_A.weight": torch.randn(rank, model.hidden_size, generator=generator),
            f"{module}.lora_B.weight": torch.randn(queries, rank, generator=generator),
        },
        folder / WEIGHTS_FILE,
    )
    return folder
