"""Engine with a model's shape: start, prefills, loads, decode steps, busy share."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from benchmarks.gpu.busy import trace
from benchmarks.gpu.engine_runs import EngineRun, engine_config
from benchmarks.gpu.loads import (
    Load,
    ideal,
    kv_bytes_per_token,
    nano_load,
    prefill_flops,
    thousand_load,
    weight_bytes_per_step,
)
from benchmarks.gpu.report import BUSY, LLAMA_8B, QWEN_06B, QWEN_8B, START, Detail, decode, prefill
from benchmarks.gpu.scope import Scope

_CONTEXT = 1024
_BATCHES = (1, 8, 32, 128, 256)
_PREFILLS = ((1, 2048), (8, 1024), (1, 32_768))
_SMOKE_CONTEXT = 3
_SMOKE_BATCHES = (1, 2)
_SMOKE_PREFILLS = ((2, 3),)
_STEPS, _SMOKE_STEPS = 32, 1
_REPEATS, _SMOKE_REPEATS = 3, 1
# Time reserved after the loads for the section's decode steps.
_AFTER_LOADS_S = 25.0


def run(scope: Scope, model: str) -> None:
    # In a smoke run one model is computed in Triton's interpreter, the others by the references.
    kernels = "triton" if not scope.smoke or model == QWEN_06B else "reference"
    config = engine_config(scope, kernels=kernels, cuda_graphs=not scope.smoke)
    with tempfile.TemporaryDirectory() as folder:
        engine = EngineRun(scope, model, Path(folder), config)
    stats = engine.engine.stats()
    scope.emit(
        START,
        engine.start_s,
        "s",
        details={"num_blocks": stats.num_blocks, "block_size_tokens": config.block_size_tokens},
    )
    for count, num_tokens in _SMOKE_PREFILLS if scope.smoke else _PREFILLS:
        _prefill(scope, engine, count, num_tokens)
    for load in loads_of(model, smoke=scope.smoke, engine=engine, seed=scope.seed):
        _load(scope, engine, load)
    for batch in _SMOKE_BATCHES if scope.smoke else _BATCHES:
        _decode(scope, engine, batch)
    _busy(scope, engine, BUSY)
    engine.shrink(1)
    _busy(scope, engine, f"{BUSY}, batch 1")


def loads_of(model: str, *, smoke: bool, engine: EngineRun, seed: int) -> list[Load]:
    """Return the loads of a model."""
    vocab_size = engine.model.vocab_size
    nano = nano_load(smoke=smoke, vocab_size=vocab_size)
    thousand = thousand_load(smoke=smoke, vocab_size=vocab_size, seed=seed)
    return {LLAMA_8B: [thousand], QWEN_06B: [nano, thousand], QWEN_8B: [nano]}[model]


def _prefill(scope: Scope, engine: EngineRun, count: int, num_tokens: int) -> None:
    """Measure the matrix rate of prefills, attention included."""
    name = prefill(count, num_tokens)
    if scope.out_of_time(name):
        return
    with scope.case(name):
        engine.prefill_s(count, num_tokens)
        repeats = _SMOKE_REPEATS if scope.smoke else _REPEATS
        times_s = [engine.prefill_s(count, num_tokens) for _ in range(repeats)]
        median_s = statistics.median(times_s)
        flops = count * prefill_flops(engine.model, num_tokens)
        details: dict[str, Detail] = {
            "ms": median_s * 1e3,
            "tokens_per_s": count * num_tokens / median_s,
            "note": f"{median_s * 1e3:.1f} ms, {count * num_tokens / median_s:,.0f} tokens/s",
        }
        scope.emit(
            name,
            flops / median_s / 1e12,
            "TFLOP/s",
            ceiling=scope.ceilings.flops / 1e12,
            details=details,
        )


def _load(scope: Scope, engine: EngineRun, load: Load) -> None:
    if scope.out_of_time(load.name, _AFTER_LOADS_S):
        return
    with scope.case(load.name):
        served = engine.serve(load, scope.left_s - _AFTER_LOADS_S)
        best = ideal(engine.model, load.requests, scope.ceilings)
        details: dict[str, Detail] = {
            "num_output_tokens": served.num_tokens,
            "elapsed_s": served.elapsed_s,
            "roofline_tokens_per_s": load.num_output_tokens / best.roofline_s,
            "num_preemptions": engine.engine.stats().num_preemptions,
        }
        if not served.whole:
            details["note"] = f"cut after {served.elapsed_s:.0f} s"
        scope.emit(
            load.name,
            served.tokens_per_s,
            "tokens/s",
            ceiling=load.num_output_tokens / best.bandwidth_s,
            details=details,
        )


def _decode(scope: Scope, engine: EngineRun, batch: int) -> None:
    """Measure a step relative to one read of all weights and of the batch's KV cache."""
    name = decode(batch)
    if scope.out_of_time(name):
        return
    with scope.case(name):
        engine.grow(batch, _SMOKE_CONTEXT if scope.smoke else _CONTEXT)
        measured = engine.decode_steps(_SMOKE_STEPS if scope.smoke else _STEPS)
        median_s = statistics.median(measured.steps_s)
        num_bytes = weight_bytes_per_step(engine.model)
        num_bytes += measured.num_cached_tokens * kv_bytes_per_token(engine.model)
        scope.emit(
            name,
            median_s * 1e3,
            "ms",
            ceiling=num_bytes / scope.ceilings.bytes_per_s * 1e3,
            details={
                "mean_ms": statistics.mean(measured.steps_s) * 1e3,
                "slowest_ms": max(measured.steps_s) * 1e3,
                "tokens_per_s": batch / median_s,
                "num_cached_tokens": measured.num_cached_tokens,
                "bytes": num_bytes,
                "note": f"{batch / median_s:,.0f} tokens/s",
            },
        )


def _busy(scope: Scope, engine: EngineRun, name: str) -> None:
    """Measure the share of a step's time in kernels: traced kernel time over untraced step time.

    Tracing lengthens the gaps between kernels, not the kernels.
    """
    num_steps = _SMOKE_STEPS if scope.smoke else _STEPS
    if scope.out_of_time(name):
        return
    with scope.case(name):
        step_s = statistics.mean(engine.decode_steps(num_steps).steps_s)

        def steps() -> None:
            for _ in range(num_steps):
                engine.step()

        traced = trace(scope.device, steps)
        busy_s = traced.busy_s / num_steps
        scope.emit(
            name,
            busy_s * 1e3,
            "ms of a step",
            ceiling=step_s * 1e3,
            share=min(1.0, busy_s / step_s),
            details={
                "share_of_trace": traced.busy_s / traced.span_s,
                "late_share_of_trace": traced.late_s / traced.span_s,
                "traced_step_ms": traced.span_s / num_steps * 1e3,
                "note": f"{traced.late_s / traced.span_s:.1%} of the trace waited for the host",
            },
        )
