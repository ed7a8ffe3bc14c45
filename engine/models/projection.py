"""Linear layers on a CPU, or by torch alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)

from millrace.engine.kernels.operations import SwiGLU, WeightSize

# How many rows oneDNN is told to expect when it lays weights out. The layout for this many is as
# fast as the best for any other number from 1 to 512.
_EXPECTED_ROWS = 64


# rows, weight, bias, name and parameters of what is applied to the result.
_linear: Callable[..., torch.Tensor] = torch.ops.mkldnn._linear_pointwise.default
# rows, what is combined with the result, weight, bias, and how.
_linear_with: Callable[..., torch.Tensor] = torch.ops.mkldnn._linear_pointwise.binary


class Projection:
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

    def gated(self, rows: torch.Tensor, swiglu: SwiGLU) -> torch.Tensor:
        """``swiglu`` of the projection of ``rows``."""
        return swiglu(self(rows))
