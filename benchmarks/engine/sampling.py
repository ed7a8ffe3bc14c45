"""Milliseconds to choose a batch's next tokens, beside one read of their logits.

    OMP_NUM_THREADS=1 python -m benchmarks.engine --only sampling [--batches 1 32] [--vocabs 8192]
        [--flat]

Token probabilities fall by Zipf's law (about 60 tokens are in a nucleus of 0.9). ``--flat`` uses
normal logits instead, as of a model with random weights. These are expensive for top-p, because
thousands of tokens are in the nucleus.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.support.machine_rates import machine_rates
from millrace.engine.kernels.random_stream import stream_key
from millrace.engine.sampling.sampler import Sampler
from millrace.engine.step.sequence import Sequence as EngineSequence
from millrace.engine.types import EngineRequest
from millrace.schemas.sampling import SamplingParams

_OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {},
    "top-k 50": {"top_k": 50},
    "min-p 0.05": {"min_p": 0.05},
    "top-p 0.9": {"top_p": 0.9},
    "typical 0.9": {"typical_p": 0.9},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.1, "frequency_penalty": 0.5},
    "bias 50": {"temperature": 0.0, "logit_bias": dict.fromkeys(range(50), 1.0)},
    "logprobs 5": {"temperature": 0.0, "logprobs": 5},
}
_PROMPT_TOKENS = 512
_SECONDS_EACH = 0.5


def run(
    batches: Sequence[int] = (1, 32, 256),
    vocabs: Sequence[int] = (8_192, 128_256),
    flat: bool = False,
) -> None:
    """Print one line per batch size and vocabulary."""
    bytes_per_s = machine_rates().read_bytes_per_s
    print(f"{torch.get_num_threads()} threads; memory is read at {bytes_per_s / 1e9:.1f} GB/s")
    print(f"{'rows':>4} {'vocab':>7} {'read':>9}" + "".join(f"{n:>13}" for n in _OPTIONS))
    for vocab_size in vocabs:
        for batch in batches:
            logits = _logits(batch, vocab_size, flat=flat)
            read_ms = logits.numel() * logits.itemsize / bytes_per_s * 1e3
            times = [_sampling_ms(logits, options) for options in _OPTIONS.values()]
            shown = "".join(f"{ms:>10.2f} ms" for ms in times)
            print(f"{batch:>4} {vocab_size:>7} {read_ms:>6.2f} ms{shown}", flush=True)


def _logits(batch: int, vocab_size: int, *, flat: bool) -> torch.Tensor:
    noise = torch.randn(batch, vocab_size)
    if flat:
        return noise.bfloat16()
    zipf = -1.5 * torch.arange(1.0, vocab_size + 1).log()
    orders = torch.rand(batch, vocab_size).argsort(-1)
    return (zipf[orders] + 0.3 * noise).bfloat16()


def _sampling_ms(logits: torch.Tensor, options: dict[str, Any]) -> float:
    batch, vocab_size = logits.shape
    sampler = Sampler(vocab_size, logits.device)
    generator = random.Random(1)
    sequences = [
        EngineSequence(
            EngineRequest(
                request_id=str(seed),
                prompt_token_ids=tuple(generator.choices(range(vocab_size), k=_PROMPT_TOKENS)),
                sampling=SamplingParams(**options),
            ),
            arrival=seed,
            key=stream_key(seed),
            max_total_tokens=1 << 20,
        )
        for seed in range(batch)
    ]
    for sequence in sequences:
        sampler.add(sequence)
    times: list[float] = []
    end_s = time.perf_counter() + _SECONDS_EACH
    while len(times) < 3 or time.perf_counter() < end_s:
        start_s = time.perf_counter()
        outcomes = sampler.sample(sequences, logits).outcomes
        times.append((time.perf_counter() - start_s) * 1e3)
        for sequence, outcome in zip(sequences, outcomes, strict=True):
            assert isinstance(outcome, int)
            sequence.token_ids.append(outcome)
    return statistics.median(times[1:])
