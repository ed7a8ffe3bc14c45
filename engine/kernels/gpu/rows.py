"""Norms and gates of rows. Sums are in float32, and each result is rounded once."""

from __future__ import annotations

import torch

from millrace.engine.kernels.gpu.jit.rows import (
    add_rms_norm_kernel,
    rms_norm_kernel,
    swiglu_kernel,
)
from millrace.engine.kernels.gpu.tiles import norm_tile, swiglu_tile


def rms_norm(rows: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Divide ``rows`` [num_rows, width] by their root mean square, times ``weight`` [width].

    Rows may be strided. Each element is read once and written once, so memory is the limit.
    """
    num_rows, width = rows.shape
    out = rows.new_empty(num_rows, width)
    if num_rows:
        tile = norm_tile(width)
        rms_norm_kernel[(num_rows,)](
            *(rows, weight, out, rows.stride(0), epsilon),
            WIDTH=width,
            BLOCK=tile.block,
            num_warps=tile.num_warps,
        )
    return out


def add_rms_norm(
    total: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """Add ``delta`` to ``total`` in place, both [num_rows, width]; return the sum's norm.

    For each element, two are read and two are written, so memory is the limit.
    """
    num_rows, width = total.shape
    out = total.new_empty(num_rows, width)
    if num_rows:
        tile = norm_tile(width)
        add_rms_norm_kernel[(num_rows,)](
            *(total, delta, weight, out, total.stride(0), delta.stride(0), epsilon),
            WIDTH=width,
            BLOCK=tile.block,
            num_warps=tile.num_warps,
        )
    return out


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute silu(gate) * up: [num_rows, width] of ``gate_up`` [num_rows, 2 * width], gates first.

    Each element is read once, so memory is the limit.
    """
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, width)
    if num_rows:
        tile = swiglu_tile(width)
        swiglu_kernel[(num_rows, -(-width // tile.block))](
            *(gate_up, out, gate_up.stride(0)),
            WIDTH=width,
            BLOCK=tile.block,
            num_warps=tile.num_warps,
        )
    return out
