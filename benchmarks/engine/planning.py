"""Python's share of a step: planning, batch layout, bookkeeping and passing on tokens.

    python -m benchmarks.engine --only planning [--sequences 32 256] [--gpu-runner] [--profile]

All sequences decode. The rest is a step's time without the model's and the sampler's; the goals are
1.0 ms at 32 sequences and 3 ms at 256. The sampler's own time, kernels and Python, is beside it.
With --gpu-runner, the rest is that of the GPU runner's step, which launches a recorded step and
chooses tokens in it. A GPU's time for a step should be longer than this.
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec

from benchmarks.support.closed_loop import greedy_request
from benchmarks.support.prompts import distinct_prompts
from millrace.engine.threads.choice import configure_threads
from millrace.schemas.config import EngineConfig

_GOALS_MS = {32: 1.0, 256: 3.0}
_PROMPT_TOKENS = 64
_BLOCK_TOKENS = 16
_WARM_UP_STEPS = 4
# Tokens that the first sequences may generate during the prefill of the last ones.
_TOKENS_BEFORE = 128
_NUM_FUNCTIONS = 25


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Median times of the steps."""

    step_ms: float
    model_ms: float
    sampler_ms: float
    rest_ms: float


class _Stopwatch:
    """Stopwatch that adds up the time in functions, and suspends a profile during it."""

    def __init__(self, profile: cProfile.Profile | None) -> None:
        self.elapsed_s = 0.0
        self._profile = profile
        self._is_running = False

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._is_running:
                return function(*args, **kwargs)
            self._is_running = True
            if self._profile is not None:
                self._profile.disable()
            begin_s = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.elapsed_s += time.perf_counter() - begin_s
                self._is_running = False
                if self._profile is not None:
                    self._profile.enable()

        return timed

    def take_ms(self) -> float:
        """Return the milliseconds since the last call."""
        elapsed_s, self.elapsed_s = self.elapsed_s, 0.0
        return elapsed_s * 1e3


@contextmanager
def _watched(
    profile: cProfile.Profile | None,
) -> Iterator[tuple[_Stopwatch, _Stopwatch]]:
    """Return stopwatches of the model and of the sampler."""
    from millrace.engine.devices.cuda.steps import RecordedSteps
    from millrace.engine.models.decoder import Decoder
    from millrace.engine.sampling.sampler import Sampler

    model, sampler = _Stopwatch(profile), _Stopwatch(profile)
    with ExitStack() as stack:
        for name in ("forward", "logits"):
            watched = model.around(getattr(Decoder, name))
            stack.enter_context(patch.object(Decoder, name, watched))
        stack.enter_context(patch.object(Sampler, "sample", sampler.around(Sampler.sample)))
        replay = model.around(RecordedSteps.replay)
        stack.enter_context(patch.object(RecordedSteps, "replay", replay))
        yield model, sampler


def measure(
    path: Path,
    num_sequences: int,
    num_steps: int,
    profile: cProfile.Profile | None,
    *,
    kernels: str = "auto",
) -> StepTimes:
    """Decode ``num_sequences`` sequences, and time ``num_steps`` steps of it."""
    from millrace.engine.step.engine import Engine
    from millrace.registry.checkpoints.checkpoint import read_model_config

    # Any multiple of the block size crosses block boundaries at the same rate.
    num_steps = -(-num_steps // _BLOCK_TOKENS) * _BLOCK_TOKENS
    total_tokens = _PROMPT_TOKENS + num_steps + _TOKENS_BEFORE
    blocks = num_sequences * (total_tokens // _BLOCK_TOKENS + 2)
    config = EngineConfig(
        device="cpu",
        kernels=kernels,
        speculation="off",
        max_num_sequences=num_sequences,
        max_batch_tokens=max(384, num_sequences),
        num_blocks=blocks * 2,
    )
    engine = Engine.load(path, config)
    vocab_size = read_model_config(path).vocab_size
    prompts = distinct_prompts(num_sequences, _PROMPT_TOKENS, vocab_size, seed=num_sequences)
    # Different lengths, so that not all sequences take a new block in the same step.
    prompts = [prompt[: _PROMPT_TOKENS - i % _BLOCK_TOKENS] for i, prompt in enumerate(prompts)]
    for index, prompt in enumerate(prompts):
        engine.add(greedy_request(str(index), prompt, total_tokens - len(prompt)))
    while engine.stats().prefill_tokens < sum(map(len, prompts)):
        engine.step()
    for _ in range(_WARM_UP_STEPS):
        engine.step()
    with _watched(profile) as (model, sampler):
        steps = [_timed(engine.step, model, sampler, profile) for _ in range(num_steps)]
    assert engine.stats().num_running == num_sequences, "not all decoded in all steps"
    return StepTimes(
        **{
            name: statistics.median(getattr(step, name) for step in steps)
            for name in StepTimes.__struct_fields__
        }
    )


def _timed(
    step: Callable[[], object],
    model: _Stopwatch,
    sampler: _Stopwatch,
    profile: cProfile.Profile | None,
) -> StepTimes:
    if profile is not None:
        profile.enable()
    begin_s = time.perf_counter()
    step()
    step_ms = (time.perf_counter() - begin_s) * 1e3
    if profile is not None:
        profile.disable()
    model_ms, sampler_ms = model.take_ms(), sampler.take_ms()
    return StepTimes(
        step_ms=step_ms,
        model_ms=model_ms,
        sampler_ms=sampler_ms,
        rest_ms=step_ms - model_ms - sampler_ms,
    )


def _line(num_sequences: int, times: StepTimes) -> str:
    goal = _GOALS_MS.get(num_sequences)
    return (
        f"{num_sequences:4} sequences: step {times.step_ms:.2f} ms, model {times.model_ms:.2f}, "
        f"sampler {times.sampler_ms:.2f}, the rest {times.rest_ms:.2f}"
        + ("" if goal is None else f" (goal: at most {goal:.1f})")
    )


def run(
    sequences: Sequence[int] = (32, 256),
    steps: int = 96,
    gpu_runner: bool = False,
    profile: bool = False,
    model: Path | None = None,
    threads: int = 0,
) -> None:
    """Print the times; ``profile`` also prints the functions that take the rest."""
    configure_threads(EngineConfig(num_threads=threads), shared=False)
    from benchmarks.checkpoints import LLAMA_100M, LlamaShape, write_llama

    with tempfile.TemporaryDirectory() as folder:
        # The GPU runner is slow here, and its model's time is irrelevant.
        tiny = LlamaShape(
            hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=32
        )
        path = model or write_llama(Path(folder), tiny if gpu_runner else LLAMA_100M)
        kernels = "reference" if gpu_runner else "auto"
        for num_sequences in sequences:
            print(_line(num_sequences, measure(path, num_sequences, steps, None, kernels=kernels)))
            if profile:
                watched = cProfile.Profile()
                measure(path, num_sequences, steps, watched, kernels=kernels)
                pstats.Stats(watched).sort_stats("tottime").print_stats(_NUM_FUNCTIONS)
