"""Rows rounded to 8 bits before a product with quantized weights."""

from __future__ import annotations

from typing import NamedTuple

import torch

from millrace.engine.kernels.gpu.jit.rounding import round_groups_kernel, round_rows_kernel
from millrace.engine.kernels.gpu.tiles import power_of_two

# Largest magnitudes of the dtypes.
MOST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
# Elements of a row that a program holds in registers.
_MOST_BLOCK = 4096
_GROUPS = 8


class RoundedRows(NamedTuple):
    """Rows in 8 bits.

    ``codes`` [num_rows, num_inputs] are multiplied by ``scales``, float32 [num_groups, num_rows]:
    one for each row, or for each of its groups of inputs.
    """

    codes: torch.Tensor
    scales: torch.Tensor


def round_rows(rows: torch.Tensor, dtype: torch.dtype, scale: float | None = None) -> RoundedRows:
    """Round ``rows`` [num_rows, num_inputs] to ``dtype``, int8 or float8_e4m3fn, with a scale each.

    The scale follows from the largest magnitude, or is ``scale`` if given. Rows may be strided.
    """
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
    """Round ``rows`` [num_rows, num_inputs] to float8_e4m3fn with a scale per group.

    A group has ``group_inputs`` neighbours of a row, a power of two. Rows may be strided.
    """
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
