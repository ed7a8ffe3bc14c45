"""Environment of the measurements."""

from __future__ import annotations

import importlib.metadata
import platform

import torch

from benchmarks.gpu.report import Environment

_PACKAGES = ("torch", "triton", "transformers", "numpy", "msgspec")


def environment(device: torch.device) -> Environment:
    packages = {}
    for name in _PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = "not installed"
    if device.type != "cuda":
        return Environment(
            device=platform.machine(), python=platform.python_version(), packages=packages
        )
    properties = torch.cuda.get_device_properties(device)
    return Environment(
        device=properties.name,
        capability=f"{properties.major}.{properties.minor}",
        multiprocessors=properties.multi_processor_count,
        memory_bytes=properties.total_memory,
        l2_bytes=properties.L2_cache_size,
        python=platform.python_version(),
        packages=packages | {"cuda": torch.version.cuda or ""},
    )
