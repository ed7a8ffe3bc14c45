"""Linear layers of wide weights: by torch, compiled kernels or a device's, and sums over ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)

from millrace.engine.kernels.cpu import CpuProducts, Finish
from millrace.engine.kernels.gpu.kernel_set import KernelSet
from millrace.engine.kernels.operations import Collectives, Linear, SwiGLU, WeightSize
from millrace.engine.kernels.packed_weight import PANEL_OUTPUTS, PackedWeight, pack_weight
from millrace.engine.quantization.linear import DequantizedLinear, unrounded_linear
from millrace.engine.quantization.packing import can_be_packed, pack_quantized
from millrace.engine.quantization.weight import QuantizedWeight

# Number of rows for which oneDNN chooses a layout of the weights. This one is as fast as the best
# layout for any number from 1 to 512.
_EXPECTED_ROWS = 64


# Arguments: rows, weight, bias, then name and parameters of a function of the result.
_linear: Callable[..., torch.Tensor] = torch.ops.mkldnn._linear_pointwise.default
# Arguments: rows, the tensor to combine with the result, weight, bias, and the operation.
_linear_with: Callable[..., torch.Tensor] = torch.ops.mkldnn._linear_pointwise.binary


class Projection(Linear):
    """Linear map of ``weight`` [num_outputs, num_inputs] and ``bias`` [num_outputs].

    bfloat16 weights on a CPU are laid out for its matrix units here, once. In the checkpoint's
    layout every product would convert them again. A product of 100M parameters and one row takes
    8.5 ms instead of 12 ms on two cores, and with 32 rows 11 ms instead of 14 ms.
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
        """Multiply [num_rows, num_inputs] to [num_rows, num_outputs]."""
        if self._packed:
            return _linear(rows, self._weight, self._bias, "none", [], "")
        return F.linear(rows, self._weight, self._bias)

    def unrounded(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply to float32 [num_rows, num_outputs].

        oneDNN rounds every product to bfloat16, so the weight is widened for the call.
        """
        weight = self._weight.to_dense() if self._packed else self._weight
        return unrounded_linear(rows, weight, self._bias)

    def plus(self, total: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return ``total`` [num_rows, num_outputs] plus the projection; may overwrite ``total``.

        oneDNN rounds the projection before it is added to a float32 ``total``.
        """
        if total.dtype is not rows.dtype:
            return total.add_(self(rows))
        if self._packed:
            return _linear_with(rows, total, self._weight, self._bias, "add")
        total.addmm_(rows, self._weight.t())
        return total if self._bias is None else total.add_(self._bias)


class PackedProjection(Linear):
    """Linear map by ``weight`` in the compiled kernels' layout."""

    def __init__(self, kernels: CpuProducts, weight: PackedWeight) -> None:
        self._kernels = kernels
        self.weight = weight
        self.size = weight.size

    @classmethod
    def of_wide(
        cls, kernels: CpuProducts, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> PackedProjection:
        """Pack ``weight``, bfloat16 [num_outputs, num_inputs], and ``bias`` [num_outputs].

        The number of inputs must be a multiple of 8.
        """
        return cls(kernels, pack_weight(weight, bias))

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply [num_rows, num_inputs] to [num_rows, num_outputs]."""
        return self._into(rows.new_empty(len(rows), self.weight.num_outputs), rows, Finish.WRITE)

    def unrounded(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply to float32 [num_rows, num_outputs], the kernel's own sums."""
        shape = (len(rows), self.weight.num_outputs)
        return self._into(rows.new_empty(shape, dtype=torch.float32), rows, Finish.WRITE)

    def plus(self, total: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return ``total`` [num_rows, num_outputs] plus the projection; may overwrite ``total``."""
        return self._into(total, rows, Finish.ADD)

    def gated(self, rows: torch.Tensor, swiglu: SwiGLU) -> torch.Tensor:
        """Return SwiGLU of the projection, by ``swiglu`` for widths that the kernel rejects."""
        num_outputs = self.weight.num_outputs
        if num_outputs % (2 * PANEL_OUTPUTS):  # a panel would hold both gates and ups
            return swiglu(self(rows))
        return self._into(rows.new_empty(len(rows), num_outputs // 2), rows, Finish.GATE)

    def _into(self, out: torch.Tensor, rows: torch.Tensor, finish: Finish) -> torch.Tensor:
        self._kernels.multiply(rows.contiguous(), self.weight, out, finish)
        return out


def packed_quantized(
    kernels: CpuProducts, weight: QuantizedWeight, bias: torch.Tensor | None
) -> Linear:
    """Return the linear map of a quantized weight; by torch if the kernels do not support it."""
    if can_be_packed(weight):
        return PackedProjection(kernels, pack_quantized(weight, bias))
    return DequantizedLinear(weight, bias, torch.bfloat16)


class DeviceLinear(Linear):
    """Linear map of ``weight`` [num_outputs, num_inputs] and ``bias`` [num_outputs] on a device.

    It uses the library's matrix products, or for few rows a kernel that reads the weights faster.
    With ``fixed`` it is batch-invariant: always a kernel of one order of summation, so that a row's
    result does not depend on the number of rows.
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
        """Multiply [num_rows, num_inputs] to [num_rows, num_outputs]."""
        if self._is_ours(len(rows)):
            return self._kernels.linear(rows, self._weight, self._bias, fixed=self._fixed)
        return F.linear(rows, self._weight, self._bias)

    def unrounded(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply to float32 [num_rows, num_outputs]."""
        if self._is_ours(len(rows)):
            return self._kernels.linear(
                rows, self._weight, self._bias, fixed=self._fixed, dtype=torch.float32
            )
        return unrounded_linear(rows, self._weight, self._bias)

    def plus(self, total: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return ``total`` [num_rows, num_outputs] plus the projection; may overwrite ``total``."""
        if self._is_ours(len(rows)):
            return self._kernels.linear(
                *(rows, self._weight, self._bias),
                residual=total,
                fixed=self._fixed,
                dtype=total.dtype,
            )
        if total.dtype is not rows.dtype:
            return total.add_(self.unrounded(rows))
        total.addmm_(rows, self._weight.t())
        return total if self._bias is None else total.add_(self._bias)

    def gated(self, rows: torch.Tensor, swiglu: SwiGLU) -> torch.Tensor:
        """Return ``swiglu`` of the projection, by one kernel if that is faster."""
        if self._is_ours(len(rows)) and not self._fixed and self._bias is None:
            return self._kernels.gated_linear(rows, self._weight)
        return swiglu(self(rows))

    def _is_ours(self, num_rows: int) -> bool:
        return self._fixed or self._kernels.prefers_skinny(num_rows, *self._weight.shape)


class ReducedLinear(Linear):
    """Linear map summed over ranks: each rank's ``linear`` multiplies a part of the inputs.

    All ranks of ``collectives`` call it at the same time and get the same result. Rank 0 adds the
    bias.
    """

    def __init__(self, linear: Linear, collectives: Collectives) -> None:
        self.linear = linear
        self.collectives = collectives
        self.size = linear.size  # this rank's part

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply [num_rows, inputs of this rank] to [num_rows, num_outputs]."""
        part = self.linear(rows)
        self.collectives.all_reduce(part)
        return part

    def unrounded(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply to float32 [num_rows, num_outputs]."""
        part = self.linear.unrounded(rows)
        self.collectives.all_reduce(part)
        return part

    def plus(self, total: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return ``total`` [num_rows, num_outputs] plus the product; may overwrite ``total``.

        Parts are exchanged in the dtype of ``total``.
        """
        if total.dtype is rows.dtype:
            return total.add_(self(rows))
        return self.plus_parts(total, self.linear.plus(torch.zeros_like(total), rows))

    def plus_parts(self, total: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """Return ``total`` plus the sum of the ranks' parts; may overwrite both arguments.

        ``part`` is this rank's, a contiguous [num_rows, num_outputs].
        """
        self.collectives.all_reduce(part)
        return total.add_(part)
