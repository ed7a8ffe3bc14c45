"""Ceilings of the device: the rates that all figures are compared with."""

from __future__ import annotations

import torch

from benchmarks.gpu.kernel_cases import Call, timed
from benchmarks.gpu.report import Ceilings
from benchmarks.gpu.scope import Scope

# Bytes of the source, several dozen times the last level's cache; a copy moves twice this.
_COPY_BYTES = 4 << 30
_SMOKE_COPY_BYTES = 1 << 22
_GEMM_SIZE = 8192
_SMOKE_GEMM_SIZE = 128


def run(scope: Scope) -> None:
    bytes_per_s = _copy_bandwidth(scope)
    flops = _matmul_rate(scope)
    scope.set_ceilings(Ceilings(bytes_per_s=bytes_per_s, flops=flops))
    scope.emit("copy, bytes read and written", bytes_per_s / 1e9, "GB/s")
    scope.emit("bf16 matrix product, random data", flops / 1e12, "TFLOP/s")


def _copy_bandwidth(scope: Scope) -> float:
    size_bytes = _SMOKE_COPY_BYTES if scope.smoke else _COPY_BYTES
    source = torch.randint(
        0, 256, (size_bytes,), dtype=torch.uint8, device=scope.device, generator=scope.generator()
    )
    target = torch.empty_like(source)
    return 2 * size_bytes / timed(scope.device, [lambda: target.copy_(source)]).median_s


def _matmul_rate(scope: Scope) -> float:
    """Return the rate of torch's library on random numbers; on zeros it is higher."""
    size = _SMOKE_GEMM_SIZE if scope.smoke else _GEMM_SIZE
    generator = scope.generator(1)

    def matrix() -> torch.Tensor:
        numbers = torch.randn(size, size, device=scope.device, generator=generator)
        return numbers.bfloat16()

    def product(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> Call:
        return lambda: torch.matmul(left, right, out=out)

    calls = [product(matrix(), matrix(), matrix()) for _ in range(2)]
    return 2 * size**3 / timed(scope.device, calls).median_s
