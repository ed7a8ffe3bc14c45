"""Gain of recorded graphs and overlapped steps: the same decode steps without them."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu.engine_runs import EngineRun, engine_config
from benchmarks.gpu.report import QWEN_06B
from benchmarks.gpu.scope import Scope

_CONTEXT, _SMOKE_CONTEXT = 1024, 3
_BATCHES, _SMOKE_BATCHES = (8, 128), (1, 2)
_STEPS, _SMOKE_STEPS = 32, 2
# Room for the largest batch beside the memory of the engine dropped last.
_BLOCKS, _SMOKE_BLOCKS = 12_288, 16


class Mode(NamedTuple):
    name: str
    cuda_graphs: bool
    overlap: bool


_MODES = (
    Mode("eager", cuda_graphs=False, overlap=False),
    Mode("graphs", cuda_graphs=True, overlap=False),
    Mode("graphs, overlapped", cuda_graphs=True, overlap=True),
    Mode("eager, overlapped", cuda_graphs=False, overlap=True),
)


def run(scope: Scope) -> None:
    base_s: dict[int, float] = {}
    for mode in _MODES:
        if scope.out_of_time(mode.name):
            continue
        with scope.case(mode.name):
            _measure(scope, mode, base_s)
        scope.free_memory()


def _measure(scope: Scope, mode: Mode, base_s: dict[int, float]) -> None:
    """Emit rows relative to the first mode's times, ``base_s`` by batch."""
    config = engine_config(
        scope,
        kernels="reference" if scope.smoke else "triton",
        cuda_graphs=mode.cuda_graphs,
        overlap=mode.overlap,
        num_blocks=_SMOKE_BLOCKS if scope.smoke else _BLOCKS,
    )
    with tempfile.TemporaryDirectory() as folder:
        engine = EngineRun(scope, QWEN_06B, Path(folder), config)
    for batch in _SMOKE_BATCHES if scope.smoke else _BATCHES:
        engine.grow(batch, _SMOKE_CONTEXT if scope.smoke else _CONTEXT)
        measured = engine.decode_steps(_SMOKE_STEPS if scope.smoke else _STEPS)
        median_s = statistics.median(measured.steps_s)
        first_s = base_s.setdefault(batch, median_s)
        scope.emit(
            f"{QWEN_06B} decode step, batch {batch}: {mode.name}",
            median_s * 1e3,
            "ms",
            details={"note": f"{first_s / median_s:.2f}x", "start_s": engine.start_s},
        )
