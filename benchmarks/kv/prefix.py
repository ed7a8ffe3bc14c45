"""Cost and gain of the prefix cache: throughput by hit rate, and TTFT of cached prompts.

    python -m benchmarks.kv --only prefix [--rounds 5]

Prompts share their first part, which an earlier request left in the cache. An engine with the cache
and one without get the same prompts in turn; the figure is the ratio of each pair. The goals: less
than 1 % slower without hits, at least 2.5 times the throughput at 75 % hits.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from benchmarks.support.closed_loop import run_closed_loop
from benchmarks.support.model import measured_model
from benchmarks.support.prompts import Prompt, shared_prefix_prompts
from millrace.schemas.config import EngineConfig

if TYPE_CHECKING:
    from millrace.engine.step.engine import Engine

_HITS = (0.0, 0.5, 0.75, 0.9)
_GOALS = {0.0: "at least 0.99x", 0.75: "at least 2.50x"}
_TTFT_PROMPTS = 8
_PROMPT_TOKENS, _OUTPUT_TOKENS = 1024, 16
_REQUESTS, _STREAMS = 32, 8


class _Bench:
    """Pair of engines, with the cache and without."""

    def __init__(self, path: Path, rounds: int) -> None:
        from millrace.engine.step.engine import Engine
        from millrace.registry.checkpoints.checkpoint import read_model_config

        self._rounds = rounds
        self._vocab_size = read_model_config(path).vocab_size
        self._seed = 0
        config = EngineConfig(device="cpu", dtype="bfloat16", max_num_sequences=_STREAMS)
        self._cached = Engine.load(path, config)
        self._uncached = Engine.load(path, msgspec.structs.replace(config, prefix_cache=False))

    def throughput(self, hit: float) -> str:
        """Format one line: the share of prompt tokens found, and the ratio of throughput."""
        num_shared = round(hit * _PROMPT_TOKENS)
        ratios, rates, found, asked = [], [], 0, 0
        for round_ in range(self._rounds):
            prompts = self._prompts(num_shared)
            for engine in (self._cached, self._uncached):
                if num_shared:
                    run_closed_loop(engine, [prompts[0][:num_shared]], [1], 1)
            before = self._cached.stats()
            # Each is first in every other pair, so that a change of the machine's speed favours
            # neither.
            if round_ % 2:
                cached_s = self._timed_s(self._cached, prompts)
                uncached_s = self._timed_s(self._uncached, prompts)
            else:
                uncached_s = self._timed_s(self._uncached, prompts)
                cached_s = self._timed_s(self._cached, prompts)
            after = self._cached.stats()
            found += after.prefix_hit_tokens - before.prefix_hit_tokens
            asked += after.prefix_query_tokens - before.prefix_query_tokens
            ratios.append(uncached_s / cached_s)
            rates.append(len(prompts) / cached_s)
        goal = f" (goal: {_GOALS[hit]})" if hit in _GOALS else ""
        return (
            f"{found / asked:4.0%} hit: {statistics.median(rates):6.2f} requests/s, "
            f"{statistics.median(ratios):.3f}x of without{goal}; pairs from {min(ratios):.3f}x to "
            f"{max(ratios):.3f}x"
        )

    def ttft(self) -> str:
        """Format one line: TTFT of a prompt alone, the first and the second time."""
        first_ms: list[float] = []
        second_ms: list[float] = []
        for _ in range(_TTFT_PROMPTS):
            prompt = self._prompts(0)[:1]
            for times_ms in (first_ms, second_ms):
                (request,) = run_closed_loop(self._cached, prompt, [1], 1)
                times_ms.append((request.parts_s[0] - request.sent_s) * 1e3)
        return (
            f"TTFT of {_PROMPT_TOKENS} tokens, alone: "
            f"{statistics.median(first_ms):.1f} ms when new, "
            f"{statistics.median(second_ms):.1f} ms when cached"
        )

    def _prompts(self, num_shared: int) -> list[Prompt]:
        """Return new prompts at each call."""
        self._seed += 1
        return shared_prefix_prompts(
            _REQUESTS,
            num_shared,
            _PROMPT_TOKENS - num_shared,
            self._vocab_size,
            self._seed,
        )

    def _timed_s(self, engine: Engine, prompts: list[Prompt]) -> float:
        lengths = [_OUTPUT_TOKENS] * len(prompts)
        begin_s = time.perf_counter()
        run_closed_loop(engine, prompts, lengths, _STREAMS)
        return time.perf_counter() - begin_s


def run(rounds: int = 5, model: Path | None = None, threads: int = 0) -> None:
    """Measure ``model``, or a new 100M Llama; 0 threads means all cores."""
    with measured_model(model, threads) as path:
        bench = _Bench(path, rounds)
        print(
            f"{_PROMPT_TOKENS} tokens in, {_OUTPUT_TOKENS} out, {_STREAMS} streams, "
            f"{_REQUESTS} requests a run"
        )
        print(bench.ttft())
        for hit in _HITS:
            print(bench.throughput(hit), flush=True)
