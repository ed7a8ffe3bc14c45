"""Products with quantized weights by torch alone, and of several weights at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)

from millrace.engine.kernels.operations import Linear, WeightSize, total_size
from millrace.engine.quantization.weight import QuantizedWeight

# Makes a product of a quantized weight and a bias [num_outputs] or None.
MakeQuantized = Callable[[QuantizedWeight, torch.Tensor | None], Linear]


class DequantizedLinear(Linear):
    """A linear map whose weight was widened to ``dtype`` when it was loaded; rows are rounded as
    the checkpoint asks. It takes the memory of a wide weight and gives the numbers of a quantized
    one. ``bias``: [num_outputs]."""

    def __init__(
        self, weight: QuantizedWeight, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> None:
        self._round = weight.rounding
        self._weight = weight.values().to(dtype)
        self.size = WeightSize.of(self._weight)
        self._bias = bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return F.linear(self._round(rows), self._weight, self._bias)


class SplitLinear(Linear):
    """Linear maps of the same rows whose outputs lie one behind the other, where one weight cannot
    hold all of them: parts of a fused projection that were quantized in different ways."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        self._parts = tuple(parts)
        self.size = total_size(part.size for part in parts)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(rows) for part in self._parts], -1)
