"""Device on the CPU that exposes reads before the device has finished."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows

import torch

from millrace.engine.devices.cuda.device import Array, HostDevice, MemoryInfo


class LateDevice(HostDevice):
    """Device that copies results to the host only at a wait, so that contents overwritten meanwhile
    show."""

    def __init__(self, memory: MemoryInfo | None = None, peak_bytes: int = 0) -> None:
        super().__init__()
        self.num_replays = 0
        self._memory = memory
        self._peak_bytes = peak_bytes

    def read_back(self, tensors: Rows[torch.Tensor]) -> Callable[[], list[Array]]:
        return lambda: [tensor.numpy().copy() for tensor in tensors]

    def record(self, work: Callable[[], object]) -> Callable[[], object]:
        def replay() -> None:
            self.num_replays += 1
            work()

        return replay

    def memory(self) -> MemoryInfo | None:
        return self._memory

    def peak_bytes(self, work: Callable[[], object]) -> int:
        work()
        return self._peak_bytes
