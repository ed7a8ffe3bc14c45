"""Linear layers by the kernels of a device."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)

from millrace.engine.kernels.gpu.kernel_set import KernelSet
from millrace.engine.kernels.operations import SwiGLU, WeightSize


class DeviceLinear:
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
