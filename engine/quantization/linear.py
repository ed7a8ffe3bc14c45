"""Products with quantized weights in torch, and with several weights at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)

from millrace.engine.kernels.operations import Linear, WeightSize, total_size
from millrace.engine.quantization.weight import QuantizedWeight

# Outputs whose weights are widened at a time.
_WIDENED_OUTPUTS = 4096

# Maker of a product from a quantized weight and a bias [num_outputs] or None.
MakeQuantized = Callable[[QuantizedWeight, torch.Tensor | None], Linear]


class DequantizedLinear(Linear):
    """Linear map whose weight is widened to ``dtype`` at load.

    Rows are rounded as the checkpoint asks, unless they may stay wide. It takes the memory of a
    wide weight and returns the numbers of the quantized one. ``bias`` is [num_outputs].
    """

    def __init__(
        self, weight: QuantizedWeight, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> None:
        self._rounding = None if weight.activations.may_stay_wide else weight.rounding
        self._weight = weight.values().to(dtype)
        self.size = WeightSize.of(self._weight)
        self._bias = bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return F.linear(self._operand(rows), self._weight, self._bias)

    def unrounded(self, rows: torch.Tensor) -> torch.Tensor:
        return unrounded_linear(self._operand(rows), self._weight, self._bias)

    def _operand(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self._rounding is None else self._rounding(rows)


class SplitLinear(Linear):
    """Linear maps of the same rows whose outputs follow each other.

    For parts of a fused projection that were quantized in different ways, so that one weight cannot
    hold them.
    """

    def __init__(self, parts: Sequence[Linear]) -> None:
        self._parts = tuple(parts)
        self.size = total_size(part.size for part in parts)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(rows) for part in self._parts], -1)

    def unrounded(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([part.unrounded(rows) for part in self._parts], -1)


def unrounded_linear(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Multiply ``rows`` with ``weight`` transposed, to float32 [num_rows, num_outputs], by torch.

    Rows in float64 stay so. A CPU's library rounds products of 16-bit numbers. So there ``weight``
    [num_outputs, num_inputs] is widened, some outputs at a time.
    """
    if rows.dtype.itemsize >= torch.float32.itemsize:
        return F.linear(rows, weight, bias)
    if rows.device.type == "cuda":
        product = torch.mm(rows, weight.t(), out_dtype=torch.float32)
        return product if bias is None else product.add_(bias)
    product = rows.new_empty(len(rows), len(weight), dtype=torch.float32)
    wide = rows.float()
    for begin in range(0, len(weight), _WIDENED_OUTPUTS):
        outputs = slice(begin, begin + _WIDENED_OUTPUTS)
        product[:, outputs] = wide @ weight[outputs].float().t()
    return product if bias is None else product.add_(bias)
