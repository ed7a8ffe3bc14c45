"""Products of float8 by torch, which are faster than Triton's for many rows."""

from __future__ import annotations

import torch

from millrace.engine.kernels.gpu.quantized.packing import PackedWeight
from millrace.engine.kernels.gpu.quantized.rounding import RoundedRows

# Least capability for torch's float8 product with a scale per row and column.
_LEAST_CAPABILITY = (9, 0)
# From this number of rows on, computing is the limit instead of reading the weights.
_LEAST_ROWS = 128


def library_takes(weight: PackedWeight, dtype: torch.dtype) -> bool:
    """Return whether ``library_linear`` supports ``weight`` on its device, into ``dtype``."""
    device = weight.codes.device
    return (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY
        and fits_library(weight, dtype)
    )


def fits_library(weight: PackedWeight, dtype: torch.dtype) -> bool:
    """Return whether torch has this product on some device."""
    return (
        dtype is torch.bfloat16
        and weight.codes.dtype is torch.float8_e4m3fn
        and weight.group_inputs == 0
        and weight.num_outputs % 16 == 0
        and weight.num_inputs % 16 == 0
    )


def prefers_library(num_rows: int) -> bool:
    """Return whether ``library_linear`` should be faster than Triton's kernel."""
    return num_rows >= _LEAST_ROWS


def library_linear(
    rows: RoundedRows,
    weight: PackedWeight,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Multiply ``rows``, with a scale each, with ``weight`` transposed, and add ``bias``.

    ``bias`` is bfloat16 [num_outputs]; ``scales``, the weight's, is float32 [1, num_outputs].
    Returns [num_rows, num_outputs] in ``dtype``, bfloat16 or float32.
    """
    if bias is not None and dtype is not bias.dtype:  # torch adds a bias to its own dtype only
        return library_linear(rows, weight, scales, None, dtype).add_(bias)
    return torch._scaled_mm(
        rows.codes,
        weight.codes.t(),
        scale_a=rows.scales.view(-1, 1),
        scale_b=scales,
        bias=bias,
        out_dtype=dtype,
    )
