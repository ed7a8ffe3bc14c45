"""The models of the benchmark, made of their config.json alone, and what a step of them costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.gpu.goals import LLAMA_8B, QWEN_06B, QWEN_8B
from millrace.engine.models.loader import num_parameters
from millrace.registry.checkpoints.checkpoint import ModelConfig, read_model_config

_BYTES = 2  # of a weight, and of an element of the KV cache

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rms_norm_eps": 1e-5,
    "dtype": "bfloat16",
}
_QWEN = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "attention_bias": False,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "use_sliding_window": False,
    "max_position_embeddings": 40_960,
    "vocab_size": 151_936,
    "bos_token_id": 151_643,
    "eos_token_id": 151_645,
    "dtype": "bfloat16",
}
_CONFIGS: dict[str, dict[str, Any]] = {
    LLAMA_8B: _LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
        "bos_token_id": 128_000,
        "eos_token_id": 128_001,
    },
    QWEN_06B: _QWEN
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    QWEN_8B: _QWEN
    | {
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
}
# What makes any of them small enough for an interpreter.
_TINY = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 256,
    "rope_scaling": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def write_config(folder: Path, model: str, *, tiny: bool, **changes: Any) -> ModelConfig:
    """Make ``folder`` a checkpoint without weights."""
    content = _CONFIGS[model] | (_TINY if tiny else {}) | changes
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content, indent=1) + "\n")
    return read_model_config(folder)


def weight_bytes_per_step(config: ModelConfig) -> int:
    """All weights but an embedding of its own, of which a step reads a row for each token."""
    embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    return _BYTES * (num_parameters(config) - embedding)


def kv_bytes_per_token(config: ModelConfig) -> int:
    heads = 2 * config.num_key_value_heads * config.head_dim
    return _BYTES * heads * config.num_hidden_layers


def linear_flops_per_token(config: ModelConfig) -> int:
    """Of all linear maps but the head."""
    vocabularies = 1 if config.tie_word_embeddings else 2
    outside = vocabularies * config.vocab_size * config.hidden_size
    return 2 * (num_parameters(config) - outside)


def head_flops(config: ModelConfig) -> int:
    """Of one token that is followed by a new one."""
    return 2 * config.vocab_size * config.hidden_size


def prefill_flops(config: ModelConfig, num_tokens: int) -> int:
    """Of a prompt: the linear maps, causal attention, and the head of its last token."""
    pairs = num_tokens * (num_tokens + 1) // 2
    width = config.num_attention_heads * config.head_dim
    attention = 4 * width * config.num_hidden_layers * pairs
    return num_tokens * linear_flops_per_token(config) + attention + head_flops(config)
