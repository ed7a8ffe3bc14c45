"""Products of float8 by torch, which for many rows has faster ones than Triton makes."""

from __future__ import annotations

import torch

from millrace.engine.kernels.gpu.quantized.packing import PackedWeight
from millrace.engine.kernels.gpu.quantized.rounding import RoundedRows

# torch's product of float8 with a scale for each row and column is for these and later ones.
_LEAST_CAPABILITY = (9, 0)
# Rows from which on computing is the limit, and not reading the weights.
_LEAST_ROWS = 128


def library_takes(weight: PackedWeight, dtype: torch.dtype) -> bool:
    """Whether ``library_linear`` can multiply by ``weight``, on its device, into ``dtype``."""
    device = weight.codes.device
    return (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY
        and fits_library(weight, dtype)
    )


def fits_library(weight: PackedWeight, dtype: torch.dtype) -> bool:
    """Whether torch has the product on any device."""
    return (
        dtype is torch.bfloat16
        and weight.codes.dtype is torch.float8_e4m3fn
        and weight.group_inputs == 0
        and weight.num_outputs % 16 == 0
        and weight.num_inputs % 16 == 0
    )


def prefers_library(num_rows: int) -> bool:
    """Whether ``library_linear`` should take less time than a kernel of our own."""
    return num_rows >= _LEAST_ROWS


def library_linear(
    rows: RoundedRows, weight: PackedWeight, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """``rows`` with a scale each times ``weight`` transposed, and ``bias`` [num_outputs]: bfloat16
    [num_rows, num_outputs]. ``scales``: float32 [1, num_outputs], those of ``weight``."""
    return torch._scaled_mm(
        rows.codes,
        weight.codes.t(),
        scale_a=rows.scales.view(-1, 1),
        scale_b=scales,
        bias=bias,
        out_dtype=torch.bfloat16,
    )
