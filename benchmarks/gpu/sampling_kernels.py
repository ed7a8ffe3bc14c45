"""Choice of the next tokens on the device, by option, beside one read of the logits."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks.gpu.kernel_cases import Cost, Work, measure, returned
from benchmarks.gpu.loads import TEMPERATURE, random_prompts
from benchmarks.gpu.scope import Scope
from millrace.engine.devices.cuda.sampler import DeviceSampler
from millrace.engine.kernels.gpu.reference.sampling import token_logprobs as reference_logprobs
from millrace.engine.kernels.gpu.sampling import token_logprobs
from millrace.engine.step.sequence import Sequence
from millrace.engine.types import EngineRequest
from millrace.schemas.sampling import SamplingParams

_VOCABULARY = 151_936
_SMOKE_VOCABULARY = 300
_OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": TEMPERATURE},
    "top-k 50, top-p 0.95": {"temperature": TEMPERATURE, "top_k": 50, "top_p": 0.95},
    "top-p 0.9, min-p 0.01": {"temperature": 1.0, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"temperature": 1.0, "repetition_penalty": 1.2, "presence_penalty": 0.5},
}
# Share of rows that may choose another token, because sums are rounded in another order.
_MOST_OTHERS = 0.02


def run(scope: Scope) -> None:
    num_rows = 2 if scope.smoke else 256
    vocab_size = _SMOKE_VOCABULARY if scope.smoke else _VOCABULARY
    for name, options in _OPTIONS.items():
        _measure_choice(scope, name, options, num_rows, vocab_size)
    if not scope.smoke:
        _measure_choice(scope, "temperature", _OPTIONS["temperature"], 1, vocab_size)
    measure(
        scope,
        f"log-probabilities and 5 alternatives, {num_rows} rows",
        partial(_logprobs, scope, num_rows, vocab_size),
        Cost(num_rows * vocab_size * scope.dtype.itemsize),
    )


def _measure_choice(
    scope: Scope, name: str, options: dict[str, Any], num_rows: int, vocab_size: int
) -> None:
    measure(
        scope,
        f"sample by {name}, {num_rows} {'rows' if num_rows > 1 else 'row'}",
        partial(_choice, scope, options, num_rows, vocab_size),
        Cost(num_rows * vocab_size * scope.dtype.itemsize),
        tolerance=_MOST_OTHERS,
        error=_share_of_others,
    )


def _share_of_others(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return (actual != expected).double().mean().item()


def _logits(scope: Scope, num_rows: int, vocab_size: int, number: int) -> torch.Tensor:
    """Return logits with the spread of a trained model's."""
    return scope.normal(scope.generator(number), num_rows, vocab_size, std=3.0)


def _choice(
    scope: Scope, options: dict[str, Any], num_rows: int, vocab_size: int, number: int
) -> Work:
    logits = _logits(scope, num_rows, vocab_size, number)
    rows = torch.arange(num_rows, dtype=torch.int32, device=scope.device)
    indices = torch.arange(num_rows, device=scope.device)
    prompts = random_prompts(num_rows, 20, vocab_size, scope.seed + number)
    sampling = SamplingParams(**options)
    sequences = [
        Sequence(
            EngineRequest(request_id=str(row), prompt_token_ids=prompt, sampling=sampling),
            arrival=row,
            key=scope.seed * 1_000_003 + number * num_rows + row,
            max_total_tokens=1024,
        )
        for row, prompt in enumerate(prompts)
    ]
    out = torch.full((num_rows,), -2, device=scope.device)

    def sampler(kernels: str) -> DeviceSampler:
        made = DeviceSampler(vocab_size, num_rows + 1, scope.device, kernels=kernels)
        for row, sequence in enumerate(sequences):
            made.add(row, sequence)
        made.upload(lambda array: torch.from_numpy(array).to(scope.device))
        return made

    own = sampler("triton")

    def expected() -> list[torch.Tensor]:
        tokens = torch.full_like(out, -2)
        sampler("reference").sample(logits, rows, indices, tokens)
        return [tokens]

    return Work(lambda: own.sample(logits, rows, indices, out), lambda _: [out], expected)


def _logprobs(scope: Scope, num_rows: int, vocab_size: int, number: int) -> Work:
    logits = _logits(scope, num_rows, vocab_size, number)
    tokens = logits.argmax(-1)
    picked = torch.arange(num_rows, device=scope.device)
    return Work(
        lambda: token_logprobs(logits, picked, tokens, 5),
        returned,
        lambda: [reference_logprobs(logits, picked, tokens, 5)],
    )
