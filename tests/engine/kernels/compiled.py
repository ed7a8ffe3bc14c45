"""Compiled kernels, on machines that can compile them."""

from __future__ import annotations

import platform

import pytest
import torch

from millrace.engine.kernels.build import KernelBuildError, cpu_library, products_library
from millrace.engine.kernels.cpu import CpuKernels, CpuProducts

# The CPU's own instructions, and without some of them.
BUILDS: list[tuple[str, ...]] = [()]
if platform.machine() == "x86_64":
    BUILDS.append(("-mno-avx512bf16", "-mno-avx512vnni", "-O1"))
    BUILDS.append(("-mno-avx512f", "-O1"))


def compiled(dtype: torch.dtype) -> CpuKernels:
    """Return the compiled kernels. Skip the test without a compiler."""
    try:
        return CpuKernels(cpu_library(), dtype)
    except KernelBuildError as error:
        pytest.skip(error.message)


def compiled_products(flags: tuple[str, ...]) -> CpuProducts:
    """Return the products of one of ``BUILDS``. Skip the test without a compiler."""
    try:
        return CpuProducts(products_library(*flags) if flags else cpu_library())
    except KernelBuildError as error:
        pytest.skip(error.message)
