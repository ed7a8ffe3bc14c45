"""Adapters with random weights for the 100M Llama, in PEFT's layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file

from benchmarks.checkpoints import LlamaShape
from millrace.registry.checkpoints.adapters.config import CONFIG_FILE
from millrace.registry.checkpoints.adapters.outline import TARGETS, WEIGHTS_FILE, adapter_version
from millrace.schemas.models.adapters import AdapterRef

# What PEFT changes of a Llama where it is not told, and all that there is.
PROJECTIONS: Final[dict[str, tuple[str, ...]]] = {"q v": ("q_proj", "v_proj"), "all": TARGETS}


def write_adapter(
    folder: Path, shape: LlamaShape, targets: tuple[str, ...], rank: int, seed: int
) -> AdapterRef:
    """A bfloat16 adapter of every layer in ``folder``."""
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(targets)}
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(shape.num_layers):
        for target in targets:
            block = "self_attn" if target in TARGETS[:4] else "mlp"
            module = f"base_model.model.model.layers.{layer}.{block}.{target}"
            num_inputs, num_outputs = _sizes(shape)[target]
            for side, size in (
                ("A", (rank, num_inputs)),
                ("B", (num_outputs, rank)),
            ):
                numbers = torch.randn(*size, generator=generator) * 0.02
                tensors[f"{module}.lora_{side}.weight"] = numbers.bfloat16()
    save_file(tensors, folder / WEIGHTS_FILE)
    return AdapterRef(name=folder.name, version=adapter_version(folder), source=str(folder))


def _sizes(shape: LlamaShape) -> dict[str, tuple[int, int]]:
    hidden, inner = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    attention = [(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)]
    mlp = [(hidden, inner), (hidden, inner), (inner, hidden)]
    return dict(zip(TARGETS, attention + mlp, strict=True))
