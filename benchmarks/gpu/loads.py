"""Loads of many requests, the same for every system, and their fastest possible times."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu.report import LLAMA_8B, NANO, QWEN_06B, QWEN_8B, THOUSAND, Ceilings
from benchmarks.gpu_compile.models import CONFIGS
from millrace.engine.models.loader import num_parameters
from millrace.registry.checkpoints.checkpoint import ModelConfig, read_model_config

_BYTES = 2  # of a weight, and of an element of the KV cache

_QWEN = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "use_sliding_window": False,
    "bos_token_id": 151_643,
    "eos_token_id": 151_645,
}
# Whole models, including values that do not affect compiled kernels.
_CONFIGS: dict[str, dict[str, Any]] = {
    LLAMA_8B: CONFIGS["Llama-3.1-8B"]
    | {
        "num_hidden_layers": 32,
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
    QWEN_06B: CONFIGS["Qwen3-0.6B"] | _QWEN | {"num_hidden_layers": 28},
    QWEN_8B: CONFIGS["Qwen3-8B"] | _QWEN | {"num_hidden_layers": 36, "tie_word_embeddings": False},
}
# Changes that make any model small enough for an interpreter.
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
    """Write a checkpoint without weights to ``folder``."""
    content = _CONFIGS[model] | (_TINY if tiny else {}) | changes
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content, indent=1) + "\n")
    return read_model_config(folder)


def weight_bytes_per_step(config: ModelConfig) -> int:
    """Return the bytes of all weights except an untied embedding, which a step hardly reads."""
    embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    return _BYTES * (num_parameters(config) - embedding)


def kv_bytes_per_token(config: ModelConfig) -> int:
    heads = 2 * config.num_key_value_heads * config.head_dim
    return _BYTES * heads * config.num_hidden_layers


def linear_flops_per_token(config: ModelConfig) -> int:
    """Return the FLOPs of all linear maps except the head, per token."""
    vocabularies = 1 if config.tie_word_embeddings else 2
    outside = vocabularies * config.vocab_size * config.hidden_size
    return 2 * (num_parameters(config) - outside)


def head_flops(config: ModelConfig) -> int:
    """Return the FLOPs of the head for one token."""
    return 2 * config.vocab_size * config.hidden_size


def prefill_flops(config: ModelConfig, num_tokens: int) -> int:
    """Return the FLOPs of a prefill: linear maps, causal attention, and the head of one token."""
    pairs = num_tokens * (num_tokens + 1) // 2
    width = config.num_attention_heads * config.head_dim
    attention = 4 * width * config.num_hidden_layers * pairs
    return num_tokens * linear_flops_per_token(config) + attention + head_flops(config)


TEMPERATURE = 0.6
# Number of token ids that every benchmarked vocabulary has.
_NUM_IDS = 10_000


class Prompted(NamedTuple):
    """Prompt, and the number of tokens to generate for it."""

    prompt: tuple[int, ...]
    num_output_tokens: int


class Load(NamedTuple):
    """Load of requests that are all sent at once."""

    name: str
    requests: list[Prompted]

    @property
    def num_output_tokens(self) -> int:
        return sum(request.num_output_tokens for request in self.requests)


def nano_load(*, smoke: bool, vocab_size: int) -> Load:
    """Return 256 requests whose prompts and answers have 100 … 1024 tokens, drawn as in nano-vllm.

    They come from Python's generator with seed 0: first all prompts, each after its length, then
    all lengths of answers.
    """
    count, least, most = (2, 1, 2) if smoke else (256, 100, 1024)
    source = random.Random(0)
    largest = min(_NUM_IDS, vocab_size - 1)
    prompts = []
    for _ in range(count):
        length = source.randint(least, most)
        prompts.append(tuple(source.randint(0, largest) for _ in range(length)))
    lengths = [source.randint(least, most) for _ in range(count)]
    return Load(NANO, [Prompted(*pair) for pair in zip(prompts, lengths, strict=True)])


def thousand_load(*, smoke: bool, vocab_size: int, seed: int) -> Load:
    """Return 256 requests of 1000 tokens, with answers of 1000 tokens."""
    count, length = (2, 2) if smoke else (256, 1000)
    # Prompts for other purposes have smaller seeds, or seeds larger by a million.
    prompts = random_prompts(count, length, vocab_size, seed * 1_000_003 + 500_000)
    return Load(THOUSAND, [Prompted(prompt, length) for prompt in prompts])


def random_prompts(
    count: int, num_tokens: int, vocab_size: int, seed: int
) -> list[tuple[int, ...]]:
    source = random.Random(seed)
    ids = range(min(_NUM_IDS, vocab_size))
    return [tuple(source.choices(ids, k=num_tokens)) for _ in range(count)]


class Ideal(NamedTuple):
    """Fastest possible seconds: prompts at the matrix rate, then steps of all unfinished requests.

    In ``bandwidth_s``, a step takes as long as reading weights and KV cache. In ``roofline_s``, it
    takes at least as long as its matrix products, too.
    """

    bandwidth_s: float
    roofline_s: float


def ideal(config: ModelConfig, requests: Sequence[Prompted], ceilings: Ceilings) -> Ideal:
    prefill_s = sum(prefill_flops(config, len(r.prompt)) for r in requests) / ceilings.flops
    weights_s = weight_bytes_per_step(config) / ceilings.bytes_per_s
    token_s = kv_bytes_per_token(config) / ceilings.bytes_per_s
    flops_s = (linear_flops_per_token(config) + head_flops(config)) / ceilings.flops
    bandwidth_s = roofline_s = prefill_s
    # The first token of an answer comes from the prefill.
    left = sorted(requests, key=lambda request: request.num_output_tokens)
    context = sum(len(request.prompt) for request in left)
    step = first = 0
    while first < len(left):
        step += 1
        while first < len(left) and left[first].num_output_tokens <= step:
            context -= len(left[first].prompt) + step - 1
            first += 1
        num_left = len(left) - first
        if num_left:
            context += num_left
            cache_s = context * token_s
            bandwidth_s += weights_s + cache_s
            roofline_s += max(weights_s, num_left * flops_s) + cache_s
    return Ideal(bandwidth_s, roofline_s)
