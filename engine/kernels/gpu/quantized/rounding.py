"""Rows rounded to 8 bits before a product with quantized weights."""

from __future__ import annotations

from typing import NamedTuple

import torch

from millrace.engine.kernels.gpu.jit.rounding import round_groups_kernel, round_rows_kernel
from millrace.engine.kernels.gpu.tiles import power_of_two

# The largest magnitudes whose scale is 1.
MOST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
# Elements of a row that a program has in its registers.
_MOST_BLOCK = 4096
_GROUPS = 8


class RoundedRows(NamedTuple):
    """``codes`` [num_rows, num_inputs], times ``scales``, float32 [num_groups, num_rows]: of each
    row, or of each of its groups of inputs."""

    codes: torch.Tensor
    scales: torch.Tensor


def round_rows(rows: torch.Tensor, dtype: torch.dtype, scale: float | None = None) -> RoundedRows:
    """``rows`` [num_rows, num_inputs] in ``dtype``, int8 or float8_e4m3fn, with a scale each: that
    of the largest magnitude, or ``scale``. Rows may lie apart."""
    num_rows, num_inputs = rows.shape
    rounded = RoundedRows(
        rows.new_empty(num_rows, num_inputs, dtype=dtype),
        rows.new_empty(1, num_rows, dtype=torch.float32),
    )
    if num_rows:
        round_rows_kernel[(num_rows,)](
            *(rows, *rounded, num_inputs, rows.stride(0), 1.0 if scale is None else scale),
            MOST=MOST[dtype],
            INTEGER=dtype is torch.int8,
            STATIC=scale is not None,
            BLOCK=min(_MOST_BLOCK, max(128, power_of_two(num_inputs))),
            num_warps=8 if num_inputs > 1024 else 4,
        )
    return rounded


def round_groups(rows: torch.Tensor, group_inputs: int) -> RoundedRows:
    """``rows`` [num_rows, num_inputs] in float8_e4m3fn with a scale for each ``group_inputs``
    neighbours of a row, which is a power of two. Rows may lie apart."""
    num_rows, num_inputs = rows.shape
    num_groups = -(-num_inputs // group_inputs)
    rounded = RoundedRows(
        rows.new_empty(num_rows, num_inputs, dtype=torch.float8_e4m3fn),
        rows.new_empty(num_groups, num_rows, dtype=torch.float32),
    )
    if num_rows:
        round_groups_kernel[(num_rows, -(-num_groups // _GROUPS))](
            *(rows, *rounded, num_rows, num_inputs, rows.stride(0)),
            MOST=MOST[torch.float8_e4m3fn],
            GROUP_INPUTS=group_inputs,
            BLOCK_GROUPS=_GROUPS,
            num_warps=4,
        )
    return rounded
