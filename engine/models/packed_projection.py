"""Linear layers of bfloat16 rows by compiled kernels, on a CPU."""

from __future__ import annotations

import torch

from millrace.engine.kernels.cpu import CpuProducts, Finish
from millrace.engine.kernels.operations import Linear, SwiGLU, WeightSize
from millrace.engine.kernels.packed_weight import PANEL_OUTPUTS, PackedWeight, pack_weight
from millrace.engine.quantization.linear import DequantizedLinear
from millrace.engine.quantization.packing import can_be_packed, pack_quantized
from millrace.engine.quantization.weight import QuantizedWeight


class PackedProjection:
    """A linear map by ``weight``."""

    def __init__(self, kernels: CpuProducts, weight: PackedWeight) -> None:
        self._kernels = kernels
        self.weight = weight

    @property
    def size(self) -> WeightSize:
        return self.weight.size

    @classmethod
    def of_wide(
        cls, kernels: CpuProducts, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> PackedProjection:
        """``weight``: bfloat16 [num_outputs, num_inputs], a multiple of 8 inputs; ``bias``:
        [num_outputs]."""
        return cls(kernels, pack_weight(weight, bias))

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[num_rows, num_inputs] to [num_rows, num_outputs]."""
        return self._into(rows.new_empty(len(rows), self.weight.num_outputs), rows, Finish.WRITE)

    def plus(self, total: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """``total`` [num_rows, num_outputs] and the projection of ``rows``; ``total`` may be
        overwritten."""
        return self._into(total, rows, Finish.ADD)

    def gated(self, rows: torch.Tensor, swiglu: SwiGLU) -> torch.Tensor:
        """SwiGLU of the projection of ``rows``, by ``swiglu`` where the kernel's own cannot be."""
        num_outputs = self.weight.num_outputs
        if num_outputs % (2 * PANEL_OUTPUTS):  # gates and what they gate share a panel
            return swiglu(self(rows))
        return self._into(rows.new_empty(len(rows), num_outputs // 2), rows, Finish.GATE)

    def _into(self, out: torch.Tensor, rows: torch.Tensor, finish: Finish) -> torch.Tensor:
        self._kernels.multiply(rows.contiguous(), self.weight, out, finish)
        return out


def packed_quantized(
    kernels: CpuProducts, weight: QuantizedWeight, bias: torch.Tensor | None
) -> Linear:
    """The linear map of a quantized weight; by torch alone where the kernels do not read it."""
    if can_be_packed(weight):
        return PackedProjection(kernels, pack_quantized(weight, bias))
    return DequantizedLinear(weight, bias, torch.bfloat16)
