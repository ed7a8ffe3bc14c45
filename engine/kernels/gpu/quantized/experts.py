"""The products of a mixture of experts with quantized stacks; the rest of it is that of wide ones,
in ``engine.kernels.gpu.experts``."""

from __future__ import annotations

import torch

from millrace.engine.kernels.gpu.jit.quantized_experts import quantized_experts_kernel
from millrace.engine.kernels.gpu.quantized.packing import PackedWeight
from millrace.engine.kernels.gpu.quantized.product import layout_constants
from millrace.engine.kernels.gpu.quantized.rounding import RoundedRows
from millrace.engine.kernels.gpu.quantized.tiles import quantized_expert_tile
from millrace.engine.kernels.gpu.sorted_choices import SortedChoices
from millrace.engine.kernels.gpu.tiles import power_of_two


def quantized_gate_up(
    rows: torch.Tensor | RoundedRows,
    stack: PackedWeight,
    choices: SortedChoices,
    *,
    num_chosen: int,
    dtype: torch.dtype,
    fixed: bool = False,
) -> torch.Tensor:
    """``rows`` [num_rows, num_inputs] times the weights of each expert that they chose: in
    ``dtype`` [num_choices, num_outputs], sorted by expert. If ``fixed``, a row's result does not
    depend on the others'."""
    codes = rows.codes if isinstance(rows, RoundedRows) else rows
    out = codes.new_empty(len(choices.order), stack.num_outputs, dtype=dtype)
    _multiply(rows, stack, choices, None, out, num_chosen=num_chosen, fixed=fixed)
    return out


def quantized_down(
    rows: torch.Tensor | RoundedRows,
    stack: PackedWeight,
    choices: SortedChoices,
    weights: torch.Tensor,
    *,
    dtype: torch.dtype,
    fixed: bool = False,
) -> torch.Tensor:
    """``rows`` [num_choices, num_inputs], sorted by expert, times the weights of their experts and
    ``weights`` [num_rows, num_chosen]: in ``dtype`` [num_rows, num_chosen, num_outputs] in the
    order of the choices."""
    num_rows, num_chosen = weights.shape
    codes = rows.codes if isinstance(rows, RoundedRows) else rows
    out = codes.new_empty(num_rows, num_chosen, stack.num_outputs, dtype=dtype)
    _multiply(rows, stack, choices, weights, out, num_chosen=num_chosen, fixed=fixed)
    return out


def _multiply(
    rows: torch.Tensor | RoundedRows,
    stack: PackedWeight,
    choices: SortedChoices,
    weights: torch.Tensor | None,
    out: torch.Tensor,
    *,
    num_chosen: int,
    fixed: bool,
) -> None:
    codes, row_scales = rows if isinstance(rows, RoundedRows) else (rows, None)
    num_choices, num_experts = len(choices.order), len(stack)
    if not num_choices:
        return
    tile = quantized_expert_tile(num_choices, num_experts, codes.itemsize, fixed=fixed)
    # Every expert may have a tile that is not full, but no tile is without a row.
    num_tiles = min(num_choices, -(-num_choices // tile.rows) + num_experts - 1)
    quantized_experts_kernel[(num_tiles, -(-stack.num_outputs // tile.outputs))](
        *(codes, stack.scales if row_scales is None else row_scales, stack.codes, stack.scales),
        stack.scales if stack.zeros is None else stack.zeros,
        *(choices.ends, choices.order),
        out if weights is None else weights,  # Read only behind the second product.
        *(out, len(codes), codes.stride(0)),
        NUM_INPUTS=stack.num_inputs,
        NUM_OUTPUTS=stack.num_outputs,
        NUM_EXPERTS=num_experts,
        NUM_CHOSEN=num_chosen,
        NUM_GROUPS=stack.scales.shape[1],
        GATHERS=weights is None,
        BLOCK_EXPERTS=power_of_two(num_experts),
        BLOCK_ROWS=tile.rows,
        BLOCK_OUTPUTS=tile.outputs,
        NUM_STAGES=tile.num_stages,
        num_warps=tile.num_warps,
        **layout_constants(stack, row_scales),
    )
