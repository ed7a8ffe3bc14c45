"""Random weights in the place of a checkpoint's, for measurements."""

from __future__ import annotations

from collections.abc import Iterator
from zlib import crc32

import torch

# As wide as the usual initialisation, so that activations stay within the range of any dtype.
_STANDARD_DEVIATION = 0.02


class DummyTensors:
    """Any tensor that is asked for: ones for norms, zeros for biases, else normal noise; made on
    the device, the same for the same name, seed and device, whatever else a rank asks for."""

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        self.path = "(random weights)"
        self._dtype = dtype
        self._device = device
        self._seed = seed
        self._generator = torch.Generator(device)

    def __iter__(self) -> Iterator[str]:
        """No names: no tensor of it can be left over."""
        return iter(())

    def load(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        if name.endswith(".bias"):
            return torch.zeros(shape, dtype=self._dtype, device=self._device)
        self._generator.manual_seed(crc32(name.encode(), self._seed))
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        return tensor.normal_(0.0, _STANDARD_DEVIATION, generator=self._generator)
