"""Shapes of the models whose kernels are compiled."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from millrace.registry.checkpoints.checkpoint import ModelConfig, read_model_config

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131_072,
    "dtype": "bfloat16",
    "num_hidden_layers": 1,
}
_QWEN3 = _LLAMA | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "vocab_size": 151_936,
}


def _sizes(
    hidden: int, inner: int, num_heads: int, num_kv_heads: int, **others: Any
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        **others,
    }


# One layer suffices, or two if they differ. The last three configs belong to no model: they have
# other head dimensions, with biases, sliding windows and extreme group sizes.
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": _LLAMA | _sizes(4096, 14_336, 32, 8, vocab_size=128_256),
    "Qwen3-0.6B": _QWEN3 | _sizes(1024, 3072, 16, 8, tie_word_embeddings=True),
    "Qwen3-8B": _QWEN3 | _sizes(4096, 12_288, 32, 8),
    "Qwen3-30B-A3B": _QWEN3
    | _sizes(2048, 6144, 32, 4, num_experts=128, num_experts_per_tok=8)
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "head-dim-64": _LLAMA
    | _sizes(896, 4864, 14, 2, vocab_size=151_936, attention_bias=True, mlp_bias=True),
    "head-dim-80": _LLAMA
    | _sizes(2560, 10_240, 32, 32, vocab_size=51_200, head_dim=80)
    | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 4096,
    },
    "head-dim-256": _LLAMA | _sizes(3584, 14_336, 16, 8, vocab_size=256_000, head_dim=256),
}


def model_config(name: str) -> ModelConfig:
    """Return one of ``CONFIGS`` as the engine reads it."""
    # Through a folder, because models are read from folders.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(CONFIGS[name]))
        return read_model_config(Path(folder))
