"""Loads of many requests, the same for every system, and how fast they could be served at best."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.gpu.goals import NANO, THOUSAND
from benchmarks.gpu.report import Ceilings
from benchmarks.gpu.shapes import (
    head_flops,
    kv_bytes_per_token,
    linear_flops_per_token,
    prefill_flops,
    weight_bytes_per_step,
)
from millrace.registry.checkpoints.checkpoint import ModelConfig

TEMPERATURE = 0.6
# Token ids that every vocabulary of the benchmark has.
_NUM_IDS = 10_000


class Prompted(NamedTuple):
    """A prompt, and how many tokens are to follow it."""

    prompt: tuple[int, ...]
    num_output_tokens: int


class Load(NamedTuple):
    """Requests that are all sent at once."""

    name: str
    requests: list[Prompted]

    @property
    def num_output_tokens(self) -> int:
        return sum(request.num_output_tokens for request in self.requests)


def nano_load(*, smoke: bool, vocab_size: int) -> Load:
    """256 requests whose prompts and answers have 100 … 1024 tokens, as nano-vllm draws them: from
    Python's generator with seed 0, all prompts, each after its length, then all lengths of answers.
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
    """256 requests of 1000 tokens with 1000 tokens for an answer."""
    count, length = (2, 2) if smoke else (256, 1000)
    # Prompts that are drawn for other purposes have smaller seeds, or a million more.
    prompts = random_prompts(count, length, vocab_size, seed * 1_000_003 + 500_000)
    return Load(THOUSAND, [Prompted(prompt, length) for prompt in prompts])


def random_prompts(
    count: int, num_tokens: int, vocab_size: int, seed: int
) -> list[tuple[int, ...]]:
    source = random.Random(seed)
    ids = range(min(_NUM_IDS, vocab_size))
    return [tuple(source.choices(ids, k=num_tokens)) for _ in range(count)]


class Ideal(NamedTuple):
    """Seconds: prompts at the matrix rate, then steps in which all unfinished requests decode.
    ``bandwidth_s`` lets a step take as long as reading weights and KV cache, ``roofline_s`` no less
    than its matrix products either."""

    bandwidth_s: float
    roofline_s: float


def ideal(config: ModelConfig, requests: Sequence[Prompted], ceilings: Ceilings) -> Ideal:
    prefill_s = sum(prefill_flops(config, len(r.prompt)) for r in requests) / ceilings.flops
    weights_s = weight_bytes_per_step(config) / ceilings.bytes_per_s
    token_s = kv_bytes_per_token(config) / ceilings.bytes_per_s
    flops_s = (linear_flops_per_token(config) + head_flops(config)) / ceilings.flops
    bandwidth_s = roofline_s = prefill_s
    # The first token of an answer comes of the prompt.
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
