"""Devices that compute steps: the interface, a CUDA device, and the host in place of one."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

# Two pinned pieces: one is filled while the other is copied.
_PIECE_BYTES = 8 << 20

Array = npt.NDArray[Any]
_Bytes = npt.NDArray[np.uint8]
# torch has no type annotations for these.
_stream: Callable[[torch.device], Any] = torch.cuda.Stream
_event: Callable[..., Any] = torch.cuda.Event


class PinnedStaging:
    """Copies from the host on its own stream through pinned memory that it keeps.

    The memory is pinned once, because pinning stalls the device. Any thread may call ``fill``; one
    thread at a time copies.
    """

    def __init__(self, device: torch.device) -> None:
        self._computing = torch.cuda.default_stream(device)
        self._stream = _stream(device)
        self._pieces = [torch.empty(_PIECE_BYTES, dtype=torch.uint8).pin_memory() for _ in range(2)]
        # Blocking events: a thread that waits for them sleeps.
        self._copied = [_event(blocking=True) for _ in range(2)]
        self._lock = threading.Lock()

    def fill(self, target: torch.Tensor, parts: Rows[torch.Tensor]) -> None:
        """See ``Device.fill``."""
        data = target.view(-1).view(torch.uint8)
        place = 0
        with self._lock, torch.cuda.stream(self._stream):
            self._stream.wait_stream(self._computing)
            for piece, copied in self._filled(parts):
                data[place : place + len(piece)].copy_(piece, non_blocking=True)
                copied.record(self._stream)
                place += len(piece)
            for copied in self._copied:
                copied.synchronize()
        assert place == len(data), f"{place} bytes came for {len(data)}"

    def _filled(self, parts: Rows[torch.Tensor]) -> Iterator[tuple[torch.Tensor, Any]]:
        """Yield pinned bytes of ``parts``, and the event to record once they have been copied."""
        halves = itertools.cycle(zip(self._pieces, self._copied, strict=True))
        half, copied = next(halves)
        used = 0
        for part in parts:
            # numpy copies on this thread alone and releases the GIL meanwhile.
            source: _Bytes = part.view(-1).view(torch.uint8).numpy()
            while len(source):
                taken = min(len(source), _PIECE_BYTES - used)
                np.copyto(half[used : used + taken].numpy(), source[:taken])
                source, used = source[taken:], used + taken
                if used == _PIECE_BYTES:
                    yield half, copied
                    half, copied = next(halves)
                    copied.synchronize()
                    used = 0
        if used:
            yield half[:used], copied


class MemoryInfo(NamedTuple):
    """Bytes of a device's memory: total, free, and allocated by this process's tensors."""

    total: int
    free: int
    allocated: int


class Device(Protocol):
    """Device that executes work in the order of its calls, possibly after they return.

    Only ``synchronize``, ``fill`` and the function that ``read_back`` returns wait for it.
    """

    torch_device: torch.device
    # Programs of a kernel that run concurrently when each takes half a multiprocessor.
    num_programs: int

    def upload(self, values: Array) -> torch.Tensor:
        """Return a new tensor of ``values``, which may change once this returns."""

    def write(self, target: torch.Tensor, values: Array) -> None:
        """Write ``values`` to ``target``, of equal size and dtype; they may change afterwards."""

    def fill(self, target: torch.Tensor, parts: Rows[torch.Tensor]) -> None:
        """Write the host's contiguous ``parts`` to ``target``, one after another, and wait.

        Together they have the size and dtype of ``target``. The copy runs after earlier work and
        beside later work, which must not use ``target``. Any thread may call this.
        """

    def read_back(self, tensors: Rows[torch.Tensor]) -> Callable[[], list[Array]]:
        """Start to copy new ``tensors`` to the host beside later work; return a waiting function.

        No other work may write to the tensors.
        """

    def record(self, work: Callable[[], object]) -> Callable[[], object]:
        """Record ``work`` on the device; return a function that replays it on the same tensors."""

    def synchronize(self) -> None:
        """Wait until all work is done."""

    def memory(self) -> MemoryInfo | None:
        """Return the state of the device's memory, or None if it has no memory of its own."""

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """Return the peak of additional bytes that tensors take while ``work`` runs."""


class HostDevice:
    """CPU in the place of a device: work is done when its call returns."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.num_programs = 4

    def upload(self, values: Array) -> torch.Tensor:
        return torch.from_numpy(np.array(values))

    def write(self, target: torch.Tensor, values: Array) -> None:
        target.copy_(torch.from_numpy(values))

    def fill(self, target: torch.Tensor, parts: Rows[torch.Tensor]) -> None:
        sizes = [part.numel() for part in parts]
        for own, part in zip(torch.split(target.view(-1), sizes), parts, strict=True):
            own.copy_(part.view(-1))

    def read_back(self, tensors: Rows[torch.Tensor]) -> Callable[[], list[Array]]:
        arrays: list[Array] = [tensor.numpy() for tensor in tensors]
        return lambda: arrays

    def record(self, work: Callable[[], object]) -> Callable[[], object]:
        return work

    def synchronize(self) -> None:
        """Do nothing: work is never pending."""

    def memory(self) -> MemoryInfo | None:
        return None

    def peak_bytes(self, work: Callable[[], object]) -> int:
        work()
        return 0


class CudaDevice:
    """CUDA device with three streams: one computes, one copies results to the host, one uploads."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)
        properties = torch.cuda.get_device_properties(self.torch_device)
        self.num_programs = 2 * int(properties.multi_processor_count)
        self._side = _stream(self.torch_device)
        self._pool = torch.cuda.graph_pool_handle()

    def upload(self, values: Array) -> torch.Tensor:
        # torch's cache of pinned memory does not reuse this memory before its copies are done.
        pinned = torch.from_numpy(values).pin_memory()
        return pinned.to(self.torch_device, non_blocking=True)

    def write(self, target: torch.Tensor, values: Array) -> None:
        target.copy_(torch.from_numpy(values).pin_memory(), non_blocking=True)

    def fill(self, target: torch.Tensor, parts: Rows[torch.Tensor]) -> None:
        self._staging.fill(target, parts)

    @cached_property
    def _staging(self) -> PinnedStaging:
        return PinnedStaging(self.torch_device)

    def read_back(self, tensors: Rows[torch.Tensor]) -> Callable[[], list[Array]]:
        self._side.wait_stream(torch.cuda.current_stream(self.torch_device))
        copies: list[torch.Tensor] = []
        done = _event()
        with torch.cuda.stream(self._side):
            for tensor in tensors:
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                copies.append(copy.copy_(tensor, non_blocking=True))
                # torch's cache must not reuse this memory before it has been copied.
                tensor.record_stream(self._side)
            done.record(self._side)

        def wait() -> list[Array]:
            done.synchronize()
            return [copy.numpy() for copy in copies]

        return wait

    def record(self, work: Callable[[], object]) -> Callable[[], object]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            work()
        replay: Callable[[], object] = graph.replay
        return replay

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def memory(self) -> MemoryInfo | None:
        # Memory that torch's cache holds for no tensor counts as free.
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return MemoryInfo(total, free, torch.cuda.memory_allocated(self.torch_device))

    def peak_bytes(self, work: Callable[[], object]) -> int:
        before = torch.cuda.memory_allocated(self.torch_device)
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        work()
        self.synchronize()
        return torch.cuda.max_memory_allocated(self.torch_device) - before


def device_of(device: torch.device) -> Device:
    """Return the ``Device`` of a torch device."""
    return CudaDevice(device) if device.type == "cuda" else HostDevice()


class Stopwatch:
    """Stopwatch of a device's work, from one lap to the next."""

    def __init__(self, device: Device, monotonic: Callable[[], float] = time.perf_counter) -> None:
        self._device = device
        self._monotonic = monotonic
        self._since_s = monotonic()

    def lap_s(self) -> float:
        """Wait for the device and return the seconds since the last lap."""
        self._device.synchronize()
        now_s = self._monotonic()
        lap_s, self._since_s = now_s - self._since_s, now_s
        return lap_s
