"""Linear layers: matrix products of rows and weights."""

from __future__ import annotations

import torch

from millrace.engine.kernels.gpu.jit.matmul import product_kernel, row_product_kernel
from millrace.engine.kernels.gpu.tiles import (
    MAX_SKINNY_ROWS,
    ProductTile,
    fixed_product_tile,
    gated_product_tile,
    product_tile,
)

# Tiles of rows that use the same weights one after another.
_GROUP = 8


def linear(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    fixed: bool = False,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply ``rows`` [num_rows, num_inputs] with the transposed ``weight``.

    ``weight`` is [num_outputs, num_inputs]. Adds ``bias`` [num_outputs] and ``residual`` [num_rows,
    num_outputs] if given; returns [num_rows, num_outputs] in ``dtype``, by default the rows' own.
    Sums are in float32 and rounded once. Rows and weights may be strided, but each must be
    contiguous in itself. With ``fixed`` it is batch-invariant: a row's result has the same bits for
    any other rows, otherwise for equal shapes.

    Up to MAX_SKINNY_ROWS rows read the weights once, and reading them is the limit.
    """
    if fixed:
        tile = fixed_product_tile(rows.shape[1], rows.itemsize)
    else:
        tile = product_tile(rows.shape[0], weight.shape[0], rows.shape[1], rows.itemsize)
    return tiled_linear(rows, weight, bias, residual, tile, dtype=dtype)


def gated_linear(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute silu(gate) * up of the product of ``rows`` and ``weight`` [2 * width, num_inputs].

    The gates come first. Returns [num_rows, width], summed in float32 and rounded once, at the end.
    """
    width = weight.shape[0] // 2
    tile = gated_product_tile(rows.shape[0], width, rows.shape[1], rows.itemsize)
    return tiled_linear(rows, weight, None, None, tile, gated=True)


def prefers_skinny(num_rows: int, num_outputs: int, num_inputs: int) -> bool:
    """Return whether ``linear`` should be faster than the vendor's library for 16-bit weights.

    It should if reading the weights is the limit and they can be read 16 bytes at a time.
    """
    return num_rows <= MAX_SKINNY_ROWS and num_outputs >= 16 and num_inputs % 16 == 0


def tiled_linear(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    tile: ProductTile,
    *,
    gated: bool = False,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute ``linear`` or ``gated_linear`` with a tile; one-row tiles are for single rows."""
    (num_rows, num_inputs), num_outputs = rows.shape, weight.shape[0] // (1 + gated)
    out = rows.new_empty(num_rows, num_outputs, dtype=dtype)
    if num_rows == 0:
        return out
    output_tiles = -(-num_outputs // tile.outputs)
    addends = (out if bias is None else bias, out if residual is None else residual)
    constants = {
        "BLOCK_OUTPUTS": tile.outputs,
        "BLOCK_INPUTS": tile.inputs,
        "NUM_STAGES": tile.num_stages,
        "EVEN": num_inputs % tile.inputs == 0,
        "BIASED": bias is not None,
        "ADDED": residual is not None,
        "GATED": gated,
        "num_warps": tile.num_warps,
    }
    if tile.rows == 1:
        assert num_rows == 1, "a tile for one row was chosen for several"
        row_product_kernel[(output_tiles,)](
            *(rows, weight, *addends, out, num_outputs, num_inputs, weight.stride(0)),
            **constants,
        )
        return out
    product_kernel[(-(-num_rows // tile.rows) * output_tiles,)](
        *(rows, weight, *addends, out, num_rows, num_outputs, num_inputs),
        *(rows.stride(0), weight.stride(0), addends[1].stride(0)),
        BLOCK_ROWS=tile.rows,
        GROUP=_GROUP,
        **constants,
    )
    return out
