"""Linear layers of wide weights: on a CPU or by torch alone, by compiled kernels, by those of a
device; and of which each rank of a group has some of the inputs."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)

from millrace.engine.kernels.cpu import CpuProducts, Finish
from millrace.engine.kernels.gpu.kernel_set import KernelSet
from millrace.engine.kernels.operations import Collectives, Linear, SwiGLU, WeightSize
from millrace.engine.kernels.packed_weight import PANEL_OUTPUTS, PackedWeight, pack_weight
from millrace.engine.quantization.linear import DequantizedLinear
from millrace.engine.quantization.packing import can_be_packed, pack_quantized
from millrace.engine.quantization.weight import QuantizedWeight

# How many rows oneDNN is told to expect when it lays weights out. The layout for this many is as
# fast as the best for any other number from 1 to 512.
_EXPECTED_ROWS = 64


# rows, weight, bias, name and parameters of what is applied to the result.
_linear: Callable[..., torch.Tensor] = torch.ops.mkldnn._linear_pointwise.default
# rows, what is combined with the result, weight, bias, and how.
_linear_with: Callable[..., torch.Tensor] = torch.ops.mkldnn._linear_pointwise.binary


class Projection(Linear):
    """A linear map. ``weight``: [num_outputs, num_inputs]; ``bias``: [num_outputs].

    bfloat16 weights on a CPU are laid out for its matrix units once, here; as they lie in the
    checkpoint every product would do so again. 100M parameters times one row take 8.5 ms instead
    of 12 on two cores, times 32 rows 11 instead of 14.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.size = WeightSize.of(weight)
        self._bias = bias
        self._packed = weight.dtype is torch.bfloat16 and weight.device.type == "cpu"
        self._packed &= torch.ops.mkldnn._is_mkldnn_bf16_supported()
        self._weight = weight
        if self._packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _EXPECTED_ROWS)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[num_rows, num_inputs] to [num_rows, num_outputs]."""
        if self._packed:
            return _linear(rows, self._weight, self._bias, "none", [], "")
        return F.linear(rows, self._weight, self._bias)

    def plus(self, total: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """``total`` [num_rows, num_outputs] and the projection of ``rows``; ``total`` may be
        overwritten."""
        if self._packed:
            return _linear_with(rows, total, self._weight, self._bias, "add")
        total.addmm_(rows, self._weight.t())
        return total if self._bias is None else total.add_(self._bias)


class PackedProjection(Linear):
    """A linear map by ``weight``."""

    def __init__(self, kernels: CpuProducts, weight: PackedWeight) -> None:
        self._kernels = kernels
        self.weight = weight
        self.size = weight.size

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


class DeviceLinear(Linear):
    """A linear map. ``weight``: [num_outputs, num_inputs]; ``bias``: [num_outputs].

    By the library's matrix products, or for few rows by a kernel that reads the weights faster.
    ``fixed``: always by a kernel of one order, so that a row's result does not depend on how many
    others there are.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, kernels: KernelSet, *, fixed: bool
    ) -> None:
        self.size = WeightSize.of(weight)
        self._weight = weight
        self._bias = bias
        self._kernels = kernels
        self._fixed = fixed

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[num_rows, num_inputs] to [num_rows, num_outputs]."""
        if self._is_ours(len(rows)):
            return self._kernels.linear(rows, self._weight, self._bias, fixed=self._fixed)
        return F.linear(rows, self._weight, self._bias)

    def plus(self, total: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """``total`` [num_rows, num_outputs] and the projection of ``rows``; ``total`` may be
        overwritten."""
        if self._is_ours(len(rows)):
            return self._kernels.linear(
                rows, self._weight, self._bias, residual=total, fixed=self._fixed
            )
        total.addmm_(rows, self._weight.t())
        return total if self._bias is None else total.add_(self._bias)

    def gated(self, rows: torch.Tensor, swiglu: SwiGLU) -> torch.Tensor:
        """``swiglu`` of the projection of ``rows``; by one kernel where that is faster."""
        if self._is_ours(len(rows)) and not self._fixed and self._bias is None:
            return self._kernels.gated_linear(rows, self._weight)
        return swiglu(self(rows))

    def _is_ours(self, num_rows: int) -> bool:
        return self._fixed or self._kernels.prefers_skinny(num_rows, *self._weight.shape)


class ReducedLinear(Linear):
    """A linear map that is the sum of what the ranks' own ``linear`` make of their inputs; all
    ranks of ``collectives`` call it at once, and have the same result. A bias is rank 0's."""

    def __init__(self, linear: Linear, collectives: Collectives) -> None:
        self.linear = linear
        self.collectives = collectives
        self.size = linear.size  # of this rank's part

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[num_rows, inputs of this rank] to [num_rows, num_outputs]."""
        part = self.linear(rows)
        self.collectives.all_reduce(part)
        return part

    def plus_parts(self, total: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """``total`` and the sum of the ranks' parts, of which this rank's is ``part``, a contiguous
        [num_rows, num_outputs]; both may be overwritten."""
        self.collectives.all_reduce(part)
        return total.add_(part)
