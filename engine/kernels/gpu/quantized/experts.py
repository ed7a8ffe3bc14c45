"""Products of a mixture of experts with quantized stacks.

The rest of the mixture is as for wide stacks, in ``engine.kernels.gpu.experts``.
"""

from __future__ import annotations

import torch

from millrace.engine.kernels.gpu.jit.quantized_experts import quantized_experts_kernel
from millrace.engine.kernels.gpu.quantized.packing import PackedWeight
from millrace.engine.kernels.gpu.quantized.product import layout_constants
from millrace.engine.kernels.gpu.quantized.rounding import RoundedRows
from millrace.engine.kernels.gpu.quantized.tiles import quantized_expert_tile
from millrace.engine.kernels.gpu.sorted_choices import SortedChoices
from millrace.engine.kernels.gpu.tiles import power_of_two


def quantized_products(
    rows: torch.Tensor | RoundedRows,
    stack: PackedWeight,
    choices: SortedChoices,
    *,
    num_chosen: int,
    dtype: torch.dtype,
    weights: torch.Tensor | None = None,
    fixed: bool = False,
) -> torch.Tensor:
    """Compute ``engine.kernels.gpu.experts.products`` with a quantized stack, in ``dtype``."""
    codes, row_scales = rows if isinstance(rows, RoundedRows) else (rows, None)
    num_choices, num_experts = len(choices.order), len(stack)
    out = codes.new_empty(*choices.shape_of(weights), stack.num_outputs, dtype=dtype)
    if not num_choices:
        return out
    tile = quantized_expert_tile(num_choices, num_experts, codes.itemsize, fixed=fixed)
    # Every expert may have a partial tile, but no tile is empty.
    num_tiles = min(num_choices, -(-num_choices // tile.rows) + num_experts - 1)
    quantized_experts_kernel[(num_tiles, -(-stack.num_outputs // tile.outputs))](
        *(codes, stack.scales if row_scales is None else row_scales, stack.codes, stack.scales),
        stack.scales if stack.zeros is None else stack.zeros,
        stack.scales if stack.offsets is None else stack.offsets,
        *(choices.ends, choices.order),
        out if weights is None else weights,  # Read by the second product only.
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
    return out
