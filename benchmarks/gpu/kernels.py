"""Every kernel alone."""

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
from benchmarks.gpu.scope import Scope, Turns

# Compilers beside each other: a kernel takes seconds to compile, and there are dozens.
_PROCESSES = 12
_REHEARSAL_S = 40.0


def run(scope: Scope) -> None:
    rehearse(scope, measure_all)
    measure_all(scope)


def measure_all(scope: Scope) -> None:
    attention_kernels.run(scope)
    matmul_kernels.run(scope)
    row_kernels.run(scope)
    sampling_kernels.run(scope)
    expert_kernels.run(scope)


def rehearse(scope: Scope, measure: Callable[[Scope], None]) -> None:
    """Have all kernels that ``measure``, a function of a module, measures compiled into the
    compiler's cache; in a smoke run, some of them."""
    context = multiprocessing.get_context("forkserver")
    processes = [
        context.Process(target=_rehearse_part, args=(measure, scope.smoke, scope.seed, first))
        for first in range(1 if scope.smoke else _PROCESSES)
    ]
    for process in processes:
        process.start()
    deadline_s = time.monotonic() + _REHEARSAL_S
    for process in processes:
        process.join(max(0.0, deadline_s - time.monotonic()))
        process.kill()
        process.join()


def _rehearse_part(measure: Callable[[Scope], None], smoke: bool, seed: int, first: int) -> None:
    scope = Scope(
        "rehearsal",
        smoke=smoke,
        seed=seed,
        deadline_s=time.monotonic() + _REHEARSAL_S,
        rehearsal=Turns(first, _PROCESSES),
    )
    measure(scope)
