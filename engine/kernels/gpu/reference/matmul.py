"""Linear layers: matrix products of rows and weights."""

from __future__ import annotations

import torch

from millrace.engine.kernels.gpu.reference.rows import swiglu


def linear(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    fixed: bool = False,
) -> torch.Tensor:
    """See ``engine.kernels.gpu.matmul``."""
    transposed = weight.float().t()
    if fixed:
        result = rows.new_empty(rows.shape[0], weight.shape[0], dtype=torch.float32)
        for index, row in enumerate(rows):
            # A copy of its own: how memory is aligned may decide how it is summed.
            result[index] = row.to(torch.float32, copy=True) @ transposed
    else:
        result = rows.float() @ transposed
    if bias is not None:
        result += bias.float()
    if residual is not None:
        result += residual.float()
    return result.to(rows.dtype)


def gated_linear(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """See ``engine.kernels.gpu.matmul``."""
    return swiglu(linear(rows.float(), weight)).to(rows.dtype)
