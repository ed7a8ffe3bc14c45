"""Linear layers in bfloat16 by compiled kernels, on a CPU."""

from __future__ import annotations

import torch

from millrace.workers.kernels.cpu import PANEL_OUTPUTS, CpuKernels, Finish, pack_weight
from millrace.workers.kernels.operations import SwiGLU


class PackedProjection:
    """A linear map. ``weight``: bfloat16 [num_outputs, num_inputs], a multiple of 8 inputs;
    ``bias``: [num_outputs].

    ``panels`` hold the weight as the kernels read it.
    """

    def __init__(
        self, kernels: CpuKernels, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        self._kernels = kernels
        self._num_outputs = len(weight)
        self.panels = pack_weight(weight)
        self.bias = bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[num_rows, num_inputs] to [num_rows, num_outputs]."""
        return self._into(rows.new_empty(len(rows), self._num_outputs), rows, Finish.WRITE)

    def plus(self, total: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """``total`` [num_rows, num_outputs] and the projection of ``rows``; ``total`` may be
        overwritten."""
        return self._into(total, rows, Finish.ADD)

    def gated(self, rows: torch.Tensor, swiglu: SwiGLU) -> torch.Tensor:
        """SwiGLU of the projection of ``rows``, by ``swiglu`` where the kernel's own cannot be."""
        if self._num_outputs % (2 * PANEL_OUTPUTS):  # gates and what they gate share a panel
            return swiglu(self(rows))
        return self._into(rows.new_empty(len(rows), self._num_outputs // 2), rows, Finish.GATE)

    def _into(self, out: torch.Tensor, rows: torch.Tensor, finish: Finish) -> torch.Tensor:
        self._kernels.multiply(rows.contiguous(), self.panels, self.bias, out, finish)
        return out
