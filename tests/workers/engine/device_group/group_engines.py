"""Engines of a device's runner, over several ranks or one: real processes on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from millrace.schemas.config import EngineConfig
from millrace.workers.engine.device_group.runner import DeviceGroupRunner
from millrace.workers.engine.engine import Engine

# With 4 ranks, two have each head of keys and values; MLPs divide by what kernels lay out together.
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
MOE: dict[str, Any] = SHAPE | {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}


def load(path: Path, ranks: int, **changes: Any) -> Engine:
    """An engine with few sequences and tokens, so that few steps are recorded."""
    settings: dict[str, Any] = {
        "device": "cpu",
        "kernels": "reference",
        "num_threads": 1,
        "num_blocks": 64,
        "max_num_sequences": 6,
        "max_batch_tokens": 48,
    }
    return Engine.load(path, EngineConfig(**settings | {"tensor_parallel": ranks} | changes))


def runner_of(engine: Engine) -> DeviceGroupRunner:
    runner = engine._runner
    assert isinstance(runner, DeviceGroupRunner)
    return runner
