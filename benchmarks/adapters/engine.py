"""Measurement of the engine with adapters, in a process that has all memory and threads."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import torch
from safetensors.torch import save_file

from benchmarks.checkpoints import LLAMA_100M, LlamaShape, write_llama
from benchmarks.peers.loads import DISTINCT_LOADS, Load, distinct
from benchmarks.support.closed_loop import greedy_request, run_closed_loop
from benchmarks.support.figures import Figures, figures_of, medians, percentile
from benchmarks.support.s3_server import s3_server, upload
from millrace.engine.step.engine import Engine
from millrace.engine.threads.choice import configure_threads
from millrace.registry.checkpoints.adapters.config import CONFIG_FILE
from millrace.registry.checkpoints.adapters.outline import TARGETS, WEIGHTS_FILE, adapter_version
from millrace.schemas.config import EngineConfig
from millrace.schemas.models.adapters import AdapterRef

# Targets of PEFT's default for a Llama, and all targets.
PROJECTIONS: Final[dict[str, tuple[str, ...]]] = {"q v": ("q_proj", "v_proj"), "all": TARGETS}


def write_adapter(
    folder: Path, shape: LlamaShape, targets: tuple[str, ...], rank: int, seed: int
) -> AdapterRef:
    """Write a bfloat16 adapter of every layer to ``folder``."""
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(targets)}
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(shape.num_layers):
        for target in targets:
            block = "self_attn" if target in TARGETS[:4] else "mlp"
            module = f"base_model.model.model.layers.{layer}.{block}.{target}"
            num_inputs, num_outputs = _sizes(shape)[target]
            for side, size in (
                ("A", (rank, num_inputs)),
                ("B", (num_outputs, rank)),
            ):
                numbers = torch.randn(*size, generator=generator) * 0.02
                tensors[f"{module}.lora_{side}.weight"] = numbers.bfloat16()
    save_file(tensors, folder / WEIGHTS_FILE)
    return AdapterRef(name=folder.name, version=adapter_version(folder), source=str(folder))


def _sizes(shape: LlamaShape) -> dict[str, tuple[int, int]]:
    hidden, inner = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    attention = [(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)]
    mlp = [(hidden, inner), (hidden, inner), (inner, hidden)]
    return dict(zip(TARGETS, attention + mlp, strict=True))


_NUM_ADAPTERS, _RANK = 20, 16
_BASE = "base"
# Rank at which an adapter of every projection is a file of some 20 MB.
_COLD_RANK, _NUM_COLD, _NUM_BESIDE = 64, 8, 8


class ColdFigures(msgspec.Struct, frozen=True, kw_only=True):
    """First tokens of requests whose adapter is in a local S3 server, beside streams that decode.

    ``ttft`` is with the adapter loaded and not loaded. The other figures are the 99th percentile of
    the streams' time between tokens, without such requests and with them. All in ms.
    """

    size_bytes: int
    ttft_warm_p50_ms: float
    ttft_cold_p50_ms: float
    ttft_cold_p99_ms: float
    itl_p99_ms: float
    itl_p99_beside_ms: float


class EngineFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures by load, then by the base alone or with twenty adapters."""

    figures: dict[str, dict[str, Figures]]
    adapter_bytes: dict[str, int]
    cold: ColdFigures


def _run(
    engine: Engine, load: Load, run: int, adapters: Sequence[AdapterRef], vocab_size: int
) -> Figures:
    prompts = load.prompts(run, vocab_size)
    num_output_tokens = [load.num_output_tokens] * len(prompts)
    return figures_of(
        run_closed_loop(engine, prompts, num_output_tokens, load.streams, adapters=adapters)
    )


def _measure_loads(
    engine: Engine, kinds: dict[str, list[AdapterRef]], runs: int
) -> dict[str, dict[str, Figures]]:
    """Measure in turns, so that a slow minute of the machine affects all of them."""
    measured: dict[str, dict[str, Figures]] = {}
    for load in DISTINCT_LOADS:
        rounds: dict[str, list[Figures]] = {kind: [] for kind in kinds}
        for run in range(runs + 1):
            for number, (kind, adapters) in enumerate(kinds.items()):
                found = _run(engine, load, 10 * run + number, adapters, LLAMA_100M.vocab_size)
                if run:  # the first warms up
                    rounds[kind].append(found)
        measured[load.name] = {kind: medians(figures) for kind, figures in rounds.items()}
    return measured


def _measure_cold(engine: Engine, folder: Path, bucket: str) -> ColdFigures:
    """Measure adapters that are in a bucket only."""
    targets = PROJECTIONS["all"]
    fresh = []
    for number in range(_NUM_COLD):
        own = folder / f"cold{number}"
        made = write_adapter(own, LLAMA_100M, targets, _COLD_RANK, 100 + number)
        upload(own, f"{bucket}/{own.name}")
        fresh.append(msgspec.structs.replace(made, source=f"{bucket}/{own.name}"))
    size_bytes = sum(file.stat().st_size for file in own.iterdir())
    alone = _Beside(engine, [])
    alone.run()
    cold = _Beside(engine, fresh)
    cold.run()
    warm = _Beside(engine, fresh)
    warm.run()
    return ColdFigures(
        size_bytes=size_bytes,
        ttft_warm_p50_ms=percentile(warm.ttft_ms, 0.5),
        ttft_cold_p50_ms=percentile(cold.ttft_ms, 0.5),
        ttft_cold_p99_ms=percentile(cold.ttft_ms, 0.99),
        itl_p99_ms=percentile(warm.gaps_ms, 0.99),
        itl_p99_beside_ms=percentile(cold.gaps_ms, 0.99),
    )


class _Beside:
    """Streams of the base that decode, beside short requests with an adapter of its own each."""

    def __init__(self, engine: Engine, adapters: Sequence[AdapterRef]) -> None:
        self.engine = engine
        self._adapters = list(adapters)
        self.ttft_ms: list[float] = []
        self.gaps_ms: list[float] = []
        self._prompts = distinct(_NUM_BESIDE + _NUM_COLD, 64).prompts(7, LLAMA_100M.vocab_size)

    def run(self) -> None:
        """Run until all requests have been answered."""
        engine, last_s = self.engine, dict[str, float]()
        for number in range(_NUM_BESIDE):
            prompt = self._prompts[number]
            engine.add(greedy_request(f"beside{number}", prompt, 60 * (1 + len(self._adapters))))
        waiting = list(enumerate(self._adapters))
        sent_s, asked, num_steps = 0.0, "", 0
        while engine.has_work:
            num_steps += 1
            if not asked and waiting and num_steps % 40 == 0:
                number, adapter = waiting.pop(0)
                asked = f"asked{number}"
                one = greedy_request(asked, self._prompts[_NUM_BESIDE + number][:16], 2)
                sent_s = time.perf_counter()
                engine.add(msgspec.structs.replace(one, adapter=adapter, cache_salt=asked))
            for output in engine.step():
                now_s = time.perf_counter()
                if output.request_id == asked:
                    if output.token_ids and not output.finished:
                        self.ttft_ms.append((now_s - sent_s) * 1e3)
                    asked = "" if output.finished else asked
                elif output.token_ids:
                    before_s = last_s.get(output.request_id)
                    if before_s is not None:
                        self.gaps_ms.append((now_s - before_s) * 1e3)
                    last_s[output.request_id] = now_s


def measure(folder: Path, runs: int) -> EngineFigures:
    """Measure in a new process, with files in ``folder``."""
    config = EngineConfig(dtype="bfloat16", device="cpu", max_num_sequences=32)
    configure_threads(config, shared=False)
    shape = LLAMA_100M._replace(context_window_tokens=1024)
    engine = Engine.load(write_llama(folder / "llama-100m", shape), config)
    kinds: dict[str, list[AdapterRef]] = {_BASE: []}
    sizes = {}
    for kind, targets in PROJECTIONS.items():
        kinds[kind] = [
            write_adapter(folder / f"{kind}{number}", LLAMA_100M, targets, _RANK, number)
            for number in range(_NUM_ADAPTERS)
        ]
        sizes[kind] = sum(f.stat().st_size for f in Path(kinds[kind][0].source).iterdir())
    figures = _measure_loads(engine, kinds, runs)
    os.environ["MILLRACE_ARTIFACTS__PATH"] = str(folder / "artifacts")
    with s3_server() as bucket:
        cold = _measure_cold(engine, folder, bucket)
    return EngineFigures(figures=figures, adapter_bytes=sizes, cold=cold)
