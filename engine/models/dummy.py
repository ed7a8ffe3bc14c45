"""Random weights in place of a checkpoint's, for measurements."""

from __future__ import annotations

from collections.abc import Iterator
from zlib import crc32

import torch

# The usual initialisation, which keeps activations within the range of every dtype.
_STANDARD_DEVIATION = 0.02


class DummyTensors:
    """Source of random tensors: ones for norms, zeros for biases, otherwise normal noise.

    Tensors are made on the device. A tensor depends on its name, the seed and the device only, not
    on other tensors that a rank loads.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        self.path = "(random weights)"
        self._dtype = dtype
        self._device = device
        self._seed = seed
        self._generator = torch.Generator(device)

    def __iter__(self) -> Iterator[str]:
        """Return no names, so that no tensor counts as unused."""
        return iter(())

    def load(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        if name.endswith(".bias"):
            return torch.zeros(shape, dtype=self._dtype, device=self._device)
        self._generator.manual_seed(crc32(name.encode(), self._seed))
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        return tensor.normal_(0.0, _STANDARD_DEVIATION, generator=self._generator)
