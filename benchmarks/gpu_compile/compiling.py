"""Compilation by Triton in place of launches, and its results.

A launch goes through ``JITFunction.run``, which with ``warmup`` does everything but the launch. So
code that calls kernels compiles exactly the variants that it would run. It may use tensors of the
"meta" device, which have shapes and no memory, so models of any size work.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

# Compute capability of the target GPU.
CAPABILITY = 90
MAX_SHARED_BYTES = 227 * 1024
_MAX_GRID = (2**31 - 1, 65_535, 65_535)

_CUOBJDUMP = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")


class Variant(NamedTuple):
    """Compiled variant of a kernel.

    ``constants`` are its compile-time constants. ``spilled_bytes`` of a thread are in memory
    instead of registers. ``users`` are the models and steps that run it.
    """

    kernel: str
    constants: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    has_wgmma: bool
    users: list[str]

    @property
    def problem(self) -> str | None:
        """Return why a GPU should not run this variant, or None."""
        if self.spilled_bytes:
            return f"spills {self.spilled_bytes} bytes a thread"
        if self.shared_bytes > MAX_SHARED_BYTES:
            return f"takes {self.shared_bytes} bytes of shared memory of {MAX_SHARED_BYTES}"
        return None


class _Driver:
    """Driver of a GPU that can be compiled for but runs nothing."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", CAPABILITY, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        del device
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class Compilation:
    """Variants compiled inside ``instead_of_launching``.

    ``variants`` is by hash. ``failures`` has a sentence for each launch that did not compile, or
    whose grid exceeds a GPU's limits. ``user`` is recorded with each compiled variant.
    """

    def __init__(self) -> None:
        self.variants: dict[str, Variant] = {}
        self.failures: dict[str, None] = {}
        self.user = ""
        # Hashes by user, kernel, constants and argument types, on which a variant should depend
        # only.
        self._hashes: dict[tuple[str, str, str, str], dict[str, str]] = {}

    @contextlib.contextmanager
    def instead_of_launching(self) -> Iterator[None]:
        """Compile kernels inside instead of running them.

        The process cannot run kernels afterwards either: Triton assumes a GPU of this kind.
        """
        own = JITFunction.run

        def run(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            del warmup
            return self._compile(own, function, args, grid, options)

        triton.runtime.driver.set_active(_Driver())
        with mock.patch.object(JITFunction, "run", run):
            yield

    def specialised(self) -> list[str]:
        """Return a sentence for each kernel that was recompiled for another number or address.

        The model, its constants and the argument types were the same.
        """
        return [
            f"{user}: {kernel} was compiled {len(hashes)} times for {constants or 'no constants'}, "
            f"with {' and with '.join(hashes.values())}"
            for (user, kernel, constants, _), hashes in self._hashes.items()
            if len(hashes) > 1
        ]

    def _compile(
        self,
        own: Callable[..., Any],
        function: Any,
        args: tuple[Any, ...],
        grid: tuple[int, ...],
        options: dict[str, Any],
    ) -> Any:
        name = function.__name__
        constants = " ".join(f"{key}={_short(value)}" for key, value in sorted(options.items()))
        for axis, (size, limit) in enumerate(zip(grid, _MAX_GRID, strict=False)):
            if not 0 < size <= limit:
                self._fail(name, constants, f"its grid has {size} programs along axis {axis}")
        try:
            kernel = own(function, *args, grid=grid, warmup=True, **options)
        # After any error of the compiler, the other kernels are still compiled and this one is
        # reported.
        except Exception as error:  # noqa: BLE001
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            self._fail(name, constants, f"{type(error).__name__}: {lines[-1] if lines else ''}")
            return None
        if kernel.hash not in self.variants:
            self.variants[kernel.hash] = _variant(name, constants, kernel)
        users = self.variants[kernel.hash].users
        if self.user not in users:
            users.append(self.user)
        types = " ".join(
            str(arg.dtype) if isinstance(arg, torch.Tensor) else type(arg).__name__ for arg in args
        )
        numbers = " ".join(str(arg) for arg in args if isinstance(arg, int | float))
        hashes = self._hashes.setdefault((self.user, name, constants, types), {})
        hashes.setdefault(kernel.hash, numbers)
        return kernel

    def _fail(self, kernel: str, constants: str, why: str) -> None:
        self.failures[f"{self.user}: {kernel} ({constants}): {why}"] = None


def _short(value: object) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def _variant(name: str, constants: str, kernel: Any) -> Variant:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        printed = subprocess.run(
            [_CUOBJDUMP, "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    usage = _USAGE.search(printed)
    assert usage is not None, f"cuobjdump printed no usage of {name}: {printed}"
    registers, stack_bytes, local_bytes = map(int, usage.groups())
    return Variant(
        kernel=name,
        constants=constants,
        registers=registers,
        spilled_bytes=stack_bytes + local_bytes,
        shared_bytes=kernel.metadata.shared,
        has_wgmma="wgmma" in kernel.asm["ptx"],
        users=[],
    )
