"""Addition of adapters' products to a step's rows, each row by its own adapter."""

from __future__ import annotations

from typing import NamedTuple

import torch

from millrace.engine.kernels.gpu.adapter_step import AdaptedRows, AdapterProduct, AdapterTiling
from millrace.engine.kernels.gpu.jit.adapters import expand_kernel, shrink_kernel
from millrace.engine.kernels.gpu.tiles import power_of_two


class _Tile(NamedTuple):
    """Tile shape of the adapter kernels.

    In the first kernel, ``splits`` programs share the inputs of a tile's rows; each takes
    ``inputs`` and ``ranks`` at a time. In the second, a program takes ``outputs`` and
    ``expand_ranks`` at a time.
    """

    splits: int
    inputs: int
    ranks: int
    outputs: int
    expand_ranks: int


def _tile(tile_rows: int, product: AdapterProduct, itemsize: int) -> _Tile:
    """Choose the tile shape.

    Few rows make few tiles, so their inputs are split to occupy the device. Many rows have larger
    tiles and occupy it without a split.
    """
    ranks = power_of_two(product.max_ranks)
    if itemsize > 2:
        return _Tile(4, 32, min(32, ranks), 32, min(32, ranks))
    if tile_rows > 16:
        return _Tile(2, 64, min(64, ranks), 128, min(32, ranks))
    return _Tile(8, 128, min(64, ranks), 64, min(32, ranks))


def add_adapters(
    rows: torch.Tensor,
    out: torch.Tensor,
    product: AdapterProduct,
    step: AdaptedRows,
    tiling: AdapterTiling,
) -> None:
    """Add the adapters' products B A x of ``rows`` to ``out``, in place.

    ``out`` [num_rows, num_outputs] holds the product of ``rows`` [num_rows, num_inputs] with a
    weight. Rows without an adapter stay unchanged. A row must be contiguous; rows may be strided.

    Sums over inputs are in float32 and rounded to the dtype of B once. The added product is rounded
    once, together with its target. With a fixed ``tiling`` a row's result has the same bits for any
    other rows, otherwise for equal shapes.
    """
    num_rows, num_inputs = rows.shape
    num_tiles = len(step.tiles)
    if not num_tiles:
        return
    block_rows = tiling.tile_rows(num_rows)
    tile = _tile(block_rows, product, rows.itemsize)
    # Whole blocks, so that there are at most the requested number of splits.
    split_inputs = -(-num_inputs // (tile.splits * tile.inputs)) * tile.inputs
    num_splits = -(-num_inputs // split_inputs)
    partials = rows.new_empty(num_splits, num_rows, product.max_ranks, dtype=torch.float32)
    tensors = (product.data, product.table, step.tiles, step.order)
    strides = (product.data.stride(0), product.table.stride(0))
    shrink_kernel[(num_tiles, num_splits)](
        *(rows, *tensors, partials, num_rows, rows.stride(0), *strides),
        NUM_INPUTS=num_inputs,
        SPLIT_INPUTS=split_inputs,
        MAX_RANKS=product.max_ranks,
        BLOCK_ROWS=block_rows,
        BLOCK_RANKS=tile.ranks,
        BLOCK_INPUTS=tile.inputs,
        EVEN=num_inputs % tile.inputs == 0,
        NUM_STAGES=3,
        num_warps=4,
    )
    first, *others = product.widths
    num_blocks = sum(-(-width // tile.outputs) for width in product.widths)
    expand_kernel[(num_tiles, num_blocks)](
        *(partials, *tensors, out, num_rows, out.stride(0), *strides),
        NUM_SPLITS=num_splits,
        MAX_RANKS=product.max_ranks,
        FIRST_WIDTH=first,
        OTHER_WIDTH=others[0] if others else 0,
        BLOCK_ROWS=block_rows,
        BLOCK_RANKS=tile.expand_ranks,
        BLOCK_OUTPUTS=tile.outputs,
        num_warps=4,
        num_stages=1,  # Most adapters need only one turn of the loop over ranks.
    )
