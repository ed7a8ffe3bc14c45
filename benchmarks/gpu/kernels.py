"""Every kernel alone."""

from __future__ import annotations

from benchmarks.gpu import attention_kernels, matmul_kernels, row_kernels, sampling_kernels
from benchmarks.gpu.scope import Scope


def run(scope: Scope) -> None:
    attention_kernels.run(scope)
    matmul_kernels.run(scope)
    row_kernels.run(scope)
    sampling_kernels.run(scope)
