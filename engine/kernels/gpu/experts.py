"""Mixture of experts over stacked weights; the routing decisions never leave the device.

``route`` chooses experts by top-k of the softmax, ``sort_by_expert`` groups the choices by expert,
``products`` are grouped matrix products, ``add_choices`` sums the weighted results of
each row. A choice is a pair of a row and one of its experts, number ``row * num_chosen + choice``.
"""

from __future__ import annotations

import torch

from millrace.engine.kernels.gpu.jit.experts import (
    add_choices_kernel,
    expert_products_kernel,
    route_kernel,
)
from millrace.engine.kernels.gpu.sorted_choices import SortedChoices
from millrace.engine.kernels.gpu.tiles import ProductTile, power_of_two


def _tile(num_choices: int, num_experts: int, itemsize: int, *, fixed: bool) -> ProductTile:
    """Return the tile for one expert's rows, by their average number; one for all if ``fixed``.

    The average follows from the shapes.
    """
    if itemsize > 2:
        return ProductTile(32, 64, 32, 4, 2)
    if fixed:
        return ProductTile(64, 128, 64, 4, 3)
    average = num_choices / num_experts
    if average <= 16:
        return ProductTile(16, 64, 128, 4, 4)
    if average <= 64:
        return ProductTile(64, 128, 64, 4, 4)
    return ProductTile(128, 128, 64, 8, 3)


def route(
    scores: torch.Tensor, num_chosen: int, *, normalized: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the ``num_chosen`` experts with the highest ``scores`` [num_rows, num_experts].

    Returns their softmax weights, float32 [num_rows, num_chosen], summing to 1 if ``normalized``,
    and their numbers, int16. The best expert comes first, of equal ones the first. NaN scores give
    NaN weights.
    """
    num_rows, num_experts = scores.shape
    weights = scores.new_empty(num_rows, num_chosen, dtype=torch.float32)
    chosen = scores.new_empty(num_rows, num_chosen, dtype=torch.int16)
    if num_rows:
        route_kernel[(num_rows,)](
            *(scores, weights, chosen, scores.stride(0)),
            NUM_EXPERTS=num_experts,
            NUM_CHOSEN=num_chosen,
            NORMALIZED=normalized,
            BLOCK_EXPERTS=power_of_two(num_experts),
            BLOCK_CHOSEN=power_of_two(num_chosen),
            num_warps=1,
        )
    return weights, chosen


def products(
    rows: torch.Tensor,
    stack: torch.Tensor,
    choices: SortedChoices,
    *,
    num_chosen: int,
    weights: torch.Tensor | None = None,
    fixed: bool = False,
) -> torch.Tensor:
    """Multiply ``rows`` with the weights of the experts that they chose.

    ``stack`` is [num_experts, num_outputs, num_inputs], contiguous. The first product of a mixture
    has no ``weights``: it takes rows [num_rows, num_inputs] and returns [num_choices, num_outputs],
    sorted by expert. The second takes such sorted rows, [num_choices, num_inputs], and returns them
    times ``weights`` [num_rows, num_chosen] in the order of the choices: [num_rows, num_chosen,
    num_outputs]. With ``fixed`` it is batch-invariant: a row's result does not depend on other
    rows.
    """
    num_experts, num_outputs, num_inputs = stack.shape
    out = rows.new_empty(*choices.shape_of(weights), num_outputs)
    num_choices = len(choices.order)
    if not num_choices:
        return out
    tile = _tile(num_choices, num_experts, rows.element_size(), fixed=fixed)
    # Every expert may have a partial tile, but no tile is empty.
    num_tiles = min(num_choices, -(-num_choices // tile.rows) + num_experts - 1)
    expert_products_kernel[(num_tiles, -(-num_outputs // tile.outputs))](
        *(rows, stack, choices.ends, choices.order),
        out if weights is None else weights,  # Read by the second product only.
        *(out, rows.stride(0)),
        NUM_INPUTS=num_inputs,
        NUM_OUTPUTS=num_outputs,
        NUM_EXPERTS=num_experts,
        NUM_CHOSEN=num_chosen,
        GATHERS=weights is None,
        BLOCK_EXPERTS=power_of_two(num_experts),
        BLOCK_ROWS=tile.rows,
        BLOCK_OUTPUTS=tile.outputs,
        BLOCK_INPUTS=tile.inputs,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


def add_choices(total: torch.Tensor, results: torch.Tensor) -> torch.Tensor:
    """Add the sum of each row's ``results`` [num_rows, num_chosen, width] to ``total``, in place.

    ``total`` is [num_rows, width]. Results are added in order and rounded once.
    """
    num_rows, num_chosen, width = results.shape
    if num_rows:
        # At least one element per thread, because the sum overwrites its input.
        block = max(128, min(1024, power_of_two(width)))
        add_choices_kernel[(num_rows, -(-width // block))](
            *(total, results, total.stride(0)),
            WIDTH=width,
            NUM_CHOSEN=num_chosen,
            BLOCK=block,
            num_warps=4,
        )
    return total
