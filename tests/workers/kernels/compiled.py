"""The compiled kernels, where this machine can compile them."""

from __future__ import annotations

import platform

import pytest
import torch

from millrace.workers.kernels.build import KernelBuildError, cpu_library
from millrace.workers.kernels.cpu import CpuKernels

# The CPU's own instructions, and without some of them.
BUILDS: list[tuple[str, ...]] = [()]
if platform.machine() == "x86_64":
    BUILDS.append(("-mno-avx512bf16", "-mno-avx512vnni", "-O1"))


def compiled(dtype: torch.dtype, *more_flags: str) -> CpuKernels:
    """Skips the test without a compiler."""
    try:
        return CpuKernels(cpu_library(*more_flags), dtype)
    except KernelBuildError as error:
        pytest.skip(error.message)
