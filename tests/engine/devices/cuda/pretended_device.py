"""Pretended CUDA device: its tensors are on the device and have no contents."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from millrace.engine.devices.cuda.device import Array, MemoryInfo
from millrace.engine.kernels import gpu

CUDA = torch.device("cuda", 0)
_MAX_GRID = (2**31 - 1, 65_535, 65_535)
_SINGLE = ("_local_scalar_dense", "is_nonzero", "item")
_WAITING = (*_SINGLE, "nonzero", "masked_select", "_unique2", "unique_consecutive", "bincount")


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that returns 1 for every read of contents. While ``recording``, a read of
    contents and an input from the host are errors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = False
        self.without_contents = FakeTensorMode()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if self.recording:
            by_flags = name == "index" and any(t.dtype is torch.bool for t in tensors[1:])
            assert name not in _WAITING, f"{name} waits for the device in a recording"
            assert not by_flags, f"{name} by flags waits for the device in a recording"
            on_host = [t for t in tensors if t.device.type == "cpu"]
            assert not on_host, f"{name} in a recording takes {on_host} from the host"
            assert name != "lift_fresh", "a recording makes a tensor of values of the host"
        if name in _SINGLE:
            return 1.0 if tensors[0].dtype.is_floating_point else 1
        for tensor in tensors:
            if isinstance(tensor, FakeTensor):
                tensor.constant = None  # else what it knows of a single number is computed with
        made = func(*args, **(kwargs or {}))
        if self.recording:
            places = {leaf.device.type for leaf in tree_leaves(made) if torch.is_tensor(leaf)}
            assert places <= {"cuda"}, f"{name} in a recording makes a tensor on {places}"
        return made


class PretendedDevice:
    """Device that accepts transfers to its type and computes nothing."""

    num_programs = 264
    work_bytes = 1 << 29

    def __init__(self, operations: Operations, memory: MemoryInfo | None = None) -> None:
        self.torch_device = CUDA
        self.num_recorded = 0
        self.num_replays = 0
        self._operations = operations
        self._memory = memory

    def upload(self, values: Array) -> torch.Tensor:
        assert isinstance(values, np.ndarray)
        dtype = torch.from_numpy(np.empty(0, values.dtype)).dtype
        return torch.empty(values.shape, dtype=dtype, device=CUDA)

    def write(self, target: torch.Tensor, values: Array) -> None:
        assert target.is_cuda
        assert target.is_contiguous()
        assert (target.shape, target.dtype) == (values.shape, self.upload(values).dtype)

    def fill(self, target: torch.Tensor, parts: Rows[torch.Tensor]) -> None:
        assert target.is_cuda
        assert target.is_contiguous()
        assert all(part.device.type == "cpu" and part.is_contiguous() for part in parts)
        assert {part.dtype for part in parts} == {target.dtype}
        assert sum(part.numel() for part in parts) == target.numel()

    def read_back(self, tensors: Rows[torch.Tensor]) -> Callable[[], list[Array]]:
        assert all(tensor.is_cuda for tensor in tensors)
        assert not any(tensor._is_view() for tensor in tensors), "somebody else may write it"
        types = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
        shapes = [tuple(tensor.shape) for tensor in tensors]
        return lambda: [np.ones(shape, of) for shape, of in zip(shapes, types, strict=True)]

    def record(self, work: Callable[[], object]) -> Callable[[], object]:
        assert not self._operations.recording
        self._operations.recording = True
        try:
            work()
        finally:
            self._operations.recording = False
        self.num_recorded += 1
        return self._replay

    def _replay(self) -> None:
        self.num_replays += 1

    def synchronize(self) -> None:
        assert not self._operations.recording

    def memory(self) -> MemoryInfo | None:
        return self._memory

    def peak_bytes(self, work: Callable[[], object]) -> int:
        work()
        return self.work_bytes


class Kernel:
    """Stand-in for a Triton kernel that checks its launch arguments."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_launches = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        for size, limit in zip(grid, _MAX_GRID, strict=False):
            assert 0 < size <= limit, f"{self.name} has a grid of {grid}"

        def launch(*args: Any, **constants: Any) -> None:
            del constants
            self.num_launches += 1
            for number, arg in enumerate(args):
                on_device = not torch.is_tensor(arg) or arg.is_cuda
                assert on_device, f"{self.name} takes argument {number} from the host"

        return launch


def replace_kernels(monkeypatch: pytest.MonkeyPatch) -> list[Kernel]:
    """Replace every kernel by a stand-in; return the stand-ins."""
    kernels: dict[str, Kernel] = {}
    for info in pkgutil.iter_modules(gpu.__path__):
        if info.ispkg:
            continue
        module = importlib.import_module(f"{gpu.__name__}.{info.name}")
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            kernel = kernels.setdefault(name, Kernel(name))
            monkeypatch.setattr(module, name, kernel)
    return list(kernels.values())


class ShapesOnly:
    """Checkpoint whose tensors have shapes only, for any name."""

    path = "(shapes)"

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def load(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        del name
        return torch.empty(shape, dtype=self._dtype, device=self._device)


@contextlib.contextmanager
def pretending(operations: Operations) -> Iterator[None]:
    """Make tensors without contents inside the block, on any device."""
    with operations.without_contents, operations:
        yield
