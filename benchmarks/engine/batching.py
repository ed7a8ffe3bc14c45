"""Gains of continuous batching, a paged cache and chunked prefill over simpler baselines.

    python -m benchmarks.engine --only batching memory chunking

Only this module has the baselines. Static batching runs a batch until its longest answer ends, with
the other answers padded; the expected gain is the longest length over the mean length of a batch. A
contiguous cache reserves the longest answer for each admitted sequence, because the length is
unknown. Chunked prefill is measured by the gaps in running streams while a long prompt enters,
whole and in chunks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from benchmarks.support.closed_loop import greedy_request, run_closed_loop
from benchmarks.support.figures import RequestTimes, percentile
from benchmarks.support.model import measured_model
from benchmarks.support.prompts import Prompt, distinct_prompts, gain_of_continuous, skewed_lengths
from millrace.schemas.config import EngineConfig

if TYPE_CHECKING:
    from millrace.engine.step.engine import Engine

_BATCHING = ("continuous", "static")
_KV = ("paged", "contiguous")
_PROMPT_TOKENS = 128
_SHORT_PROMPT_TOKENS = 16
_RUNNING_STREAMS = 8
_BLOCK_TOKENS = 16
_ENTERING_PROMPT = "the long prompt"
# Steps of the running streams before the long prompt comes.
_STEPS_BEFORE = 16


class Chunking(msgspec.Struct, frozen=True):
    """Cut of a prompt: at most ``max_batch_tokens`` a step, bounded by the predicted step time.

    A bound of 0 means no bound.
    """

    max_batch_tokens: int
    itl_bound_ms: float = 0.0


_CHUNKINGS = (
    Chunking(2048),
    Chunking(512),
    Chunking(256),
    Chunking(128),
    Chunking(2048, itl_bound_ms=200.0),
    Chunking(2048, itl_bound_ms=100.0),
)


class Load(NamedTuple):
    """Load of ``num_requests`` answers, the longest of ``longest`` tokens."""

    requests: int
    longest: int


class _Bench:
    """Model under test, and loads with skewed lengths."""

    def __init__(self, path: Path, load: Load) -> None:
        from millrace.registry.checkpoints.checkpoint import read_model_config

        self._path = path
        self._vocab_size = read_model_config(path).vocab_size
        self.longest = load.longest
        self.lengths = skewed_lengths(load.requests, self.longest, seed=1)

    def engine(self, **settings: int | float | bool) -> Engine:
        """Load an engine without a prefix cache, because prompts repeat in each round."""
        from millrace.engine.step.engine import Engine

        config = EngineConfig(device="cpu", dtype="bfloat16", prefix_cache=False)
        return Engine.load(self._path, msgspec.structs.replace(config, **settings))

    def prompts(self, count: int, num_tokens: int = _PROMPT_TOKENS) -> list[Prompt]:
        return distinct_prompts(count, num_tokens, self._vocab_size, seed=1)

    def batching(self, slots: int, rounds: int) -> None:
        """Measure tokens/s with ``slots`` sequences and memory for all."""
        engine = self.engine(max_num_sequences=slots)
        # Short, because prompts cost both the same.
        prompts = self.prompts(len(self.lengths), _SHORT_PROMPT_TOKENS)
        run_closed_loop(engine, prompts[:slots], [8] * min(slots, len(prompts)), slots)
        rates: dict[str, list[float]] = {choice: [] for choice in _BATCHING}
        for _ in range(rounds):
            for choice in _BATCHING:
                begin_s = time.perf_counter()
                if choice == "static":
                    _run_static(engine, prompts, self.lengths, slots)
                else:
                    run_closed_loop(engine, prompts, self.lengths, slots)
                rates[choice].append(sum(self.lengths) / (time.perf_counter() - begin_s))
        medians = {choice: statistics.median(runs) for choice, runs in rates.items()}
        mean = statistics.mean(self.lengths)
        print(
            f"batching, {slots} slots, {len(self.lengths)} answers of {mean:.0f} tokens on average "
            f"and at most {max(self.lengths)}"
        )
        for choice, rate in medians.items():
            print(f"  {choice:10}  {rate:7.1f} tokens/s")
        gain = medians["continuous"] / medians["static"]
        ideal = gain_of_continuous(self.lengths, slots)
        print(f"  gain {gain:.2f}x; longest of a batch over mean length {ideal:.2f}x")

    def memory(self, num_reserved: int) -> None:
        """Count sequences that run together in the same memory, and measure the gain."""
        reserved_tokens = _PROMPT_TOKENS + self.longest
        blocks = num_reserved * -(-reserved_tokens // _BLOCK_TOKENS)
        prompts = self.prompts(len(self.lengths))
        print(
            f"cache of {blocks * _BLOCK_TOKENS} tokens, {num_reserved} times the longest sequence"
        )
        fits: dict[str, float] = {}
        for choice in _KV:
            limit = num_reserved if choice == "contiguous" else len(prompts)
            engine = self.engine(num_blocks=blocks, max_num_sequences=limit)
            running: list[int] = []
            begin_s = time.perf_counter()
            run_closed_loop(
                engine,
                prompts,
                self.lengths,
                len(prompts),
                partial(_note_running, running),
            )
            rate = sum(self.lengths) / (time.perf_counter() - begin_s)
            fits[choice] = statistics.median(running)
            print(
                f"  {choice:10}  {fits[choice]:5.1f} sequences fit while others wait, "
                f"{rate:7.1f} tokens/s, {engine.stats().num_preemptions} preemptions"
            )
        print(f"  paged holds {fits['paged'] / fits['contiguous']:.2f}x as many")

    def chunking(self, num_tokens: int) -> None:
        """Measure the gaps in running streams while a long prompt enters."""
        whole = Chunking(num_tokens + _RUNNING_STREAMS)
        print(f"{_RUNNING_STREAMS} running streams while a prompt of {num_tokens} tokens enters")
        for chunking in (whole, *_CHUNKINGS):
            gaps_ms, ttft_ms = self._entry(chunking, num_tokens)
            name = (
                "whole"
                if chunking is whole
                else f"chunks of at most {chunking.max_batch_tokens}"
                + (f", {chunking.itl_bound_ms:.0f} ms" if chunking.itl_bound_ms else "")
            )
            print(
                f"  {name:32}  ITL p50 {percentile(gaps_ms, 0.5):7.1f}, "
                f"p99 {percentile(gaps_ms, 0.99):7.1f} ms; its own TTFT {ttft_ms / 1e3:5.2f} s"
            )

    def _entry(self, chunking: Chunking, num_tokens: int) -> tuple[list[float], float]:
        engine = self.engine(
            max_batch_tokens=chunking.max_batch_tokens, itl_bound_ms=chunking.itl_bound_ms
        )
        # Trains the cost model, as any longer load does.
        prompts = [prompt[: 64 * (i + 1)] for i, prompt in enumerate(self.prompts(16, 1024))]
        run_closed_loop(engine, prompts, [16] * len(prompts), _RUNNING_STREAMS)
        return self._enter(engine, num_tokens)

    def _enter(self, engine: Engine, num_tokens: int) -> tuple[list[float], float]:
        """Return the running streams' gaps in ms during the entry, and the prompt's TTFT in ms."""
        (long_prompt,) = self.prompts(1, num_tokens)
        room = engine.context_window_tokens - _PROMPT_TOKENS
        for index, prompt in enumerate(self.prompts(_RUNNING_STREAMS)):
            engine.add(greedy_request(str(index), prompt, room))
        decoded = engine.stats().decode_tokens
        while engine.stats().decode_tokens < decoded + _STEPS_BEFORE * _RUNNING_STREAMS:
            engine.step()
        begin_s = last_s = time.perf_counter()
        engine.add(greedy_request(_ENTERING_PROMPT, long_prompt, 1))
        gaps_ms: list[float] = []
        entered = False
        while not entered:
            outputs = engine.step()
            now_s = time.perf_counter()
            made = {output.request_id for output in outputs if output.token_ids}
            entered = _ENTERING_PROMPT in made
            if len(made) > entered:
                gaps_ms.append((now_s - last_s) * 1e3)
                last_s = now_s
        return gaps_ms, (time.perf_counter() - begin_s) * 1e3


def _run_static(
    engine: Engine, prompts: Sequence[Prompt], lengths: Sequence[int], batch: int
) -> list[RequestTimes]:
    """Run batch after batch; each sequence of a batch computes for as long as the longest."""
    times: list[RequestTimes] = []
    for start in range(0, len(prompts), batch):
        group = prompts[start : start + batch]
        longest = max(lengths[start : start + batch])
        times += run_closed_loop(engine, group, [longest] * len(group), len(group))
    return times


def _note_running(running: list[int], engine: Engine) -> None:
    stats = engine.stats()
    if stats.num_waiting:
        running.append(stats.num_running)


def batching(
    requests: int = 64,
    longest: int = 384,
    slots: int = 16,
    rounds: int = 3,
    model: Path | None = None,
    threads: int = 0,
) -> None:
    """Run batches of ``slots`` sequences; report the median of ``rounds``."""
    with measured_model(model, threads) as path:
        _Bench(path, Load(requests, longest)).batching(slots, rounds)


def memory(
    requests: int = 64,
    longest: int = 384,
    reservations: int = 8,
    model: Path | None = None,
    threads: int = 0,
) -> None:
    """Size the cache for ``reservations`` answers of the longest length."""
    with measured_model(model, threads) as path:
        _Bench(path, Load(requests, longest)).memory(reservations)


def chunking(long_prompt: int = 8192, model: Path | None = None, threads: int = 0) -> None:
    """Measure the entry of a prompt of ``long_prompt`` tokens."""
    with measured_model(model, threads) as path:
        _Bench(path, Load(1, 1)).chunking(long_prompt)
