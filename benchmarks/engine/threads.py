"""Gain of binding the engine's threads to cores: starts with bound and with free threads.

    python -m benchmarks.engine --only threads [--starts 8] [--beside 12] [--json FILE]

Each start is a process that computes a decode step of one stream in two layers of a 100M Llama,
with threads that sleep while they wait, as the engine does beside other processes. It runs first at
rest, then while ``--beside`` processes of the lowest priority use the idle cores. Prints the
milliseconds of each start, and how many starts took at least twice as long as the fastest. The
ceiling is one thread alone, which never waits. Two threads that are slower share a core.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from unittest.mock import patch

import msgspec

from benchmarks.support.command import PartResult
from benchmarks.support.model import write_100m
from benchmarks.support.processes import busy_processes, in_new_process
from millrace.engine.threads.choice import configure_threads
from millrace.schemas.config import EngineConfig

_STEPS = 120
_FREE = {"OMP_PROC_BIND": "false"}


_LOWEST = 19


class Starts(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds of a step by start, beside ``num_beside`` other processes.

    ``one_thread`` has starts with one thread.
    """

    num_beside: int

    bound: list[float]
    free: list[float]
    one_thread: list[float]

    def num_slow(self, starts: list[float]) -> int:
        """Return how many starts took at least twice as long as the fastest of all."""
        return sum(ms > 2 * min(*self.bound, *self.free) for ms in starts)


def _step_ms(checkpoint: Path, num_threads: int) -> float:
    """Return the median of this process's steps."""
    configure_threads(EngineConfig(num_threads=num_threads), shared=True)
    # Imported here, because torch reads the thread settings at import.
    import torch

    from millrace.engine.devices.cpu.products import sample_batches, sample_config, sample_decoder
    from millrace.engine.kernels.build import cpu_library
    from millrace.engine.kernels.cpu import CpuKernels
    from millrace.engine.models.linears import PackedProjection
    from millrace.registry.checkpoints.checkpoint import read_model_config

    kernels = CpuKernels(cpu_library(), torch.bfloat16)
    config = sample_config(read_model_config(checkpoint))
    took_s = []
    with torch.inference_mode():
        decoder = sample_decoder(kernels, config, partial(PackedProjection.of_wide, kernels))
        one_stream = sample_batches()[0]
        for _ in range(_STEPS):
            begin_s = time.perf_counter()
            decoder.forward(one_stream)
            took_s.append(time.perf_counter() - begin_s)
    return statistics.median(took_s) * 1e3


def _start(checkpoint: Path, num_threads: int, **changes: str) -> float:
    own = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    with patch.dict(os.environ, own | changes, clear=True):
        return in_new_process(_step_ms, checkpoint, num_threads)


def measure(checkpoint: Path, num_starts: int, num_beside: int) -> Starts:
    """Measure starts in turns, so that other load disturbs both kinds."""
    starts = Starts(num_beside=num_beside, bound=[], free=[], one_thread=[])
    with busy_processes(num_beside, niceness=_LOWEST):
        for _ in range(num_starts):
            starts.bound.append(_start(checkpoint, 0))
            starts.free.append(_start(checkpoint, 0, **_FREE))
        starts.one_thread.append(_start(checkpoint, 1))
    return starts


def _print(starts: Starts) -> None:
    print(f"beside {starts.num_beside} processes of the lowest priority")
    for name, took_ms in (("bound", starts.bound), ("free", starts.free)):
        each = " ".join(f"{ms:.2f}" for ms in took_ms)
        num_slow = starts.num_slow(took_ms)
        print(f"  {name:12} {each} ms; {num_slow} of {len(took_ms)} took at least twice the best")
    print(f"  {'one thread':12} {starts.one_thread[0]:.2f} ms")


def run(starts: int = 8, beside: int = 12) -> PartResult:
    """Measure ``starts`` of each kind, with ``beside`` processes of the lowest priority."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = in_new_process(write_100m, Path(folder) / "llama-100m")
        measured = [measure(checkpoint, starts, n) for n in (0, beside)]
    for one in measured:
        _print(one)
    return PartResult(measured)
