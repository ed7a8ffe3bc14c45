"""Measurement of every kernel alone, and sweeps over its possible tiles."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable

from benchmarks.gpu import (
    attention_kernels,
    expert_kernels,
    matmul_kernels,
    row_kernels,
    sampling_kernels,
)
from benchmarks.gpu.report import RunSettings
from benchmarks.gpu.scope import Scope, Turns

# Parallel compilers: a kernel takes seconds to compile, and there are dozens.
_PROCESSES = 12
_REHEARSAL_S = 40.0


def run(scope: Scope) -> None:
    rehearse(scope, measure_all)
    measure_all(scope)


def sweep(scope: Scope) -> None:
    """Time candidate tiles of each kernel that fit the device and keep results.

    A table is worth changing if the best tile is faster by more than the spread of its runs.
    """
    from benchmarks.gpu import quantized_kernels

    for measure in (measure_all, quantized_kernels.measure_all):
        rehearse(scope, measure, limit_s=scope.left_s / 3)
        measure(scope)


def measure_all(scope: Scope) -> None:
    attention_kernels.run(scope)
    matmul_kernels.run(scope)
    row_kernels.run(scope)
    sampling_kernels.run(scope)
    expert_kernels.run(scope)


def rehearse(scope: Scope, measure: Callable[[Scope], None], limit_s: float = _REHEARSAL_S) -> None:
    """Compile all kernels that ``measure``, a function of a module, uses into the compiler's cache.

    In a smoke run, compile some of them.
    """
    context = multiprocessing.get_context("forkserver")
    processes = [
        context.Process(target=_rehearse_part, args=(scope.settings, measure, limit_s, first))
        for first in range(1 if scope.smoke else _PROCESSES)
    ]
    for process in processes:
        process.start()
    deadline_s = time.monotonic() + limit_s
    for process in processes:
        process.join(max(0.0, deadline_s - time.monotonic()))
        process.kill()
        process.join()


def _rehearse_part(
    settings: RunSettings, measure: Callable[[Scope], None], limit_s: float, first: int
) -> None:
    deadline_s = time.monotonic() + limit_s
    measure(Scope("rehearsal", settings, deadline_s=deadline_s, rehearsal=Turns(first, _PROCESSES)))
