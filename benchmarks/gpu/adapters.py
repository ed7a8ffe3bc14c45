"""Engine with twenty adapters in one batch, beside the same engine without adapters."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.adapters.engine import PROJECTIONS, write_adapter
from benchmarks.checkpoints import LlamaShape
from benchmarks.gpu import adapter_kernels
from benchmarks.gpu.adapter_kernels import RANK, num_adapters
from benchmarks.gpu.engine_runs import EngineRun, engine_config
from benchmarks.gpu.kernels import rehearse
from benchmarks.gpu.loads import kv_bytes_per_token, weight_bytes_per_step
from benchmarks.gpu.report import LLAMA_8B, STEPS_BESIDE_LOADS, adapted, decode, prefill
from benchmarks.gpu.scope import Scope
from benchmarks.support.figures import percentile
from millrace.registry.checkpoints.adapters.config import CONFIG_FILE
from millrace.registry.checkpoints.adapters.outline import WEIGHTS_FILE, adapter_version
from millrace.registry.checkpoints.checkpoint import ModelConfig
from millrace.schemas.models.adapters import AdapterRef

_CONTEXT, _SMOKE_CONTEXT = 1024, 3
_STREAMS, _SMOKE_STREAMS = (1, 8, 32, 256), (1, 2)
_STEPS, _SMOKE_STEPS = 32, 1
_PREFILL, _SMOKE_PREFILL = (8, 1024), (2, 3)
_BESIDE, _SMOKE_BESIDE = 32, 1
_BASE = "the base alone"


def run(scope: Scope) -> None:
    rehearse(scope, adapter_kernels.run)
    adapter_kernels.run(scope)
    config = engine_config(
        scope,
        kernels="reference" if scope.smoke else "triton",
        cuda_graphs=not scope.smoke,
        max_adapters=num_adapters(scope),
        max_adapter_rank=RANK,
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        engine = EngineRun(scope, LLAMA_8B, folder / "model", config)
        scope.emit("start, weights to recorded graphs", engine.start_s, "s")
        kinds: dict[str, list[AdapterRef]] = {_BASE: []}
        for changed, targets in PROJECTIONS.items():
            kinds[changed] = _write(scope, folder / changed, engine.model, targets)
        for streams in _SMOKE_STREAMS if scope.smoke else _STREAMS:
            _decode(scope, engine, streams, kinds)
        _prefill(scope, engine, kinds)
        engine.shrink(0)
        _load(scope, engine, _write(scope, folder / "cold", engine.model, PROJECTIONS["all"], 1))


def _write(
    scope: Scope,
    folder: Path,
    model: ModelConfig,
    targets: tuple[str, ...],
    stream: int = 0,
) -> list[AdapterRef]:
    """Write adapters that share a file but have scales of their own, so that each has a slot."""
    shape = LlamaShape(
        hidden_size=model.hidden_size,
        num_layers=model.num_hidden_layers,
        num_heads=model.num_attention_heads,
        num_kv_heads=model.num_key_value_heads,
        intermediate_size=model.intermediate_size,
    )
    first = write_adapter(folder / "0", shape, targets, RANK, scope.seed + stream)
    content = msgspec.json.decode((folder / "0" / CONFIG_FILE).read_bytes())
    made = [first]
    for number in range(1, num_adapters(scope)):
        own = folder / str(number)
        own.mkdir()
        os.link(folder / "0" / WEIGHTS_FILE, own / WEIGHTS_FILE)
        scaled = content | {"lora_alpha": RANK + number}
        (own / CONFIG_FILE).write_bytes(msgspec.json.encode(scaled))
        made.append(
            AdapterRef(name=own.name, version=adapter_version(own), source=str(own.absolute()))
        )
    return made


def _decode(
    scope: Scope, engine: EngineRun, streams: int, kinds: dict[str, list[AdapterRef]]
) -> None:
    """Measure steps, relative to one read of weights, adapters and the batch's KV cache."""
    base_s = 0.0
    for changed, adapters in kinds.items():
        name = f"{decode(streams)}, {changed if not adapters else f'adapters of {changed}'}"
        if scope.out_of_time(name):
            continue
        with scope.case(name):
            engine.shrink(0)
            context = _SMOKE_CONTEXT if scope.smoke else _CONTEXT
            engine.grow(streams, context, adapters or (None,))
            measured = engine.decode_steps(_SMOKE_STEPS if scope.smoke else _STEPS)
            median_s = statistics.median(measured.steps_s)
            num_bytes = weight_bytes_per_step(engine.model)
            num_bytes += measured.num_cached_tokens * kv_bytes_per_token(engine.model)
            own_bytes = _weight_bytes(adapters) * min(streams, len(adapters))
            scope.emit(
                name,
                median_s * 1e3,
                "ms",
                ceiling=(num_bytes + own_bytes) / scope.ceilings.bytes_per_s * 1e3,
                details={"bytes": num_bytes, "adapter_bytes": own_bytes},
            )
            if not adapters:
                base_s = median_s
            elif base_s:
                scope.emit(
                    adapted(streams, changed),
                    base_s / median_s,
                    "x",
                    ceiling=num_bytes / (num_bytes + own_bytes),
                )


def _weight_bytes(adapters: Sequence[AdapterRef]) -> int:
    """Return the bytes of one adapter."""
    return Path(adapters[0].source, WEIGHTS_FILE).stat().st_size if adapters else 0


def _prefill(scope: Scope, engine: EngineRun, kinds: dict[str, list[AdapterRef]]) -> None:
    count, num_tokens = _SMOKE_PREFILL if scope.smoke else _PREFILL
    engine.shrink(0)
    base_s = 0.0
    for changed, adapters in kinds.items():
        name = f"{prefill(count, num_tokens)}, {changed}"
        if scope.out_of_time(name):
            continue
        with scope.case(name):
            engine.prefill_s(count, num_tokens, adapters or (None,))  # loads them
            times_s = [engine.prefill_s(count, num_tokens, adapters or (None,)) for _ in range(3)]
            median_s = statistics.median(times_s)
            base_s = base_s or median_s
            note = f"{base_s / median_s:.3f} of the base's tokens/s"
            scope.emit(name, median_s * 1e3, "ms", details={"note": note})


def _load(scope: Scope, engine: EngineRun, cold: list[AdapterRef]) -> None:
    """Measure the first tokens of requests whose adapter is in no slot, one after another.

    Also measures the steps of the base's streams meanwhile.
    """
    if scope.out_of_time(STEPS_BESIDE_LOADS):
        return
    with scope.case(STEPS_BESIDE_LOADS):
        context = _SMOKE_CONTEXT if scope.smoke else _CONTEXT
        engine.grow(_SMOKE_BESIDE if scope.smoke else _BESIDE, context)
        # The same requests without an adapter: both times include prefills.
        alone_s, _ = _ask(engine, [None] * 5 * len(cold))
        beside_s, first_s = _ask(engine, cold)
        scope.emit(
            "first token of an adapter in no slot, p50",
            percentile(first_s, 0.5) * 1e3,
            "ms",
            details={"bytes": _weight_bytes(cold), "p99_ms": percentile(first_s, 0.99) * 1e3},
        )
        scope.emit(
            STEPS_BESIDE_LOADS,
            percentile(beside_s, 0.99) / percentile(alone_s, 0.99),
            "x",
            details={"p99_ms": percentile(beside_s, 0.99) * 1e3},
        )


def _ask(
    engine: EngineRun, adapters: Sequence[AdapterRef | None]
) -> tuple[list[float], list[float]]:
    """Return the seconds of all steps, and of each short request until its token."""
    steps_s, first_s = [], []
    for adapter in adapters:
        (asked,) = engine.add(engine.prompts(1, 16), [1], adapters=(adapter,))
        sent_s = last_s = time.perf_counter()
        waits = True
        while waits:
            waits = not any(output.request_id == asked for output in engine.step())
            now_s = time.perf_counter()
            steps_s.append(now_s - last_s)
            last_s = now_s
        first_s.append(last_s - sent_s)
    return steps_s, first_s
