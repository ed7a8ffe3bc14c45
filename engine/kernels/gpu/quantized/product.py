"""Linear layers of quantized weights."""

from __future__ import annotations

import torch

from millrace.engine.kernels.gpu.jit.quantized import (
    quantized_product_kernel,
    quantized_row_kernel,
)
from millrace.engine.kernels.gpu.quantized.packing import PackedWeight
from millrace.engine.kernels.gpu.quantized.rounding import RoundedRows
from millrace.engine.kernels.gpu.quantized.tiles import (
    QuantizedTile,
    RowProductTile,
    fixed_quantized_tile,
    quantized_tile,
    row_product_tile,
)

# Tiles of rows that use the same weights one after another.
_GROUP = 8


def quantized_linear(
    rows: torch.Tensor | RoundedRows,
    weight: PackedWeight,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    dtype: torch.dtype,
    fixed: bool = False,
) -> torch.Tensor:
    """Multiply ``rows`` [num_rows, num_inputs] with ``weight`` transposed, in ``dtype``.

    Adds ``bias`` [num_outputs] and ``residual`` [num_rows, num_outputs] if given; returns
    [num_rows, num_outputs]. Rows are multiplied by the codes exactly. Products of int8 are summed
    in int32, other products and scaled sums in float32, and rounded once. With ``fixed`` it is
    batch-invariant: a row's result has the same bits for any other rows, otherwise for equal
    shapes.
    """
    wide = rows.codes if isinstance(rows, RoundedRows) else rows
    num_rows, row_bytes = len(wide), wide.itemsize
    tile: QuantizedTile | RowProductTile
    if fixed:
        tile = fixed_quantized_tile(row_bytes)
    elif num_rows == 1:
        tile = row_product_tile(weight.num_outputs, weight.chunk // (1 + weight.is_packed))
    else:
        tile = quantized_tile(num_rows, weight.num_outputs, row_bytes)
    return tiled_quantized_linear(rows, weight, bias, residual, dtype, tile)


def tiled_quantized_linear(
    rows: torch.Tensor | RoundedRows,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    dtype: torch.dtype,
    tile: QuantizedTile | RowProductTile,
) -> torch.Tensor:
    """Compute ``quantized_linear`` with a given tile; a RowProductTile is for a single row."""
    codes, row_scales = rows if isinstance(rows, RoundedRows) else (rows, None)
    (num_rows, num_inputs), num_outputs = codes.shape, weight.num_outputs
    out = codes.new_empty(num_rows, num_outputs, dtype=dtype)
    if num_rows == 0:
        return out
    output_tiles = -(-num_outputs // tile.outputs)
    # Placeholders of missing tensors are not read.
    residual_or_out = out if residual is None else residual
    tensors = (
        *(codes, weight.scales if row_scales is None else row_scales, weight.codes, weight.scales),
        weight.scales if weight.zeros is None else weight.zeros,
        weight.scales if weight.offsets is None else weight.offsets,
        out if bias is None else bias,
        *(residual_or_out, out),
    )
    constants = {
        **layout_constants(weight, row_scales),
        "BIASED": bias is not None,
        "ADDED": residual is not None,
        "BLOCK_OUTPUTS": tile.outputs,
        "NUM_STAGES": tile.num_stages,
        "num_warps": tile.num_warps,
    }
    if isinstance(tile, RowProductTile):
        assert num_rows == 1, "a tile for one row was chosen for several"
        quantized_row_kernel[(output_tiles,)](
            *(*tensors, num_outputs, num_inputs),
            BLOCK_CHUNKS=tile.chunks,
            EVEN=num_inputs // weight.chunk % tile.chunks == 0,
            **constants,
        )
        return out
    quantized_product_kernel[(-(-num_rows // tile.rows) * output_tiles,)](
        *(*tensors, num_rows, num_outputs, num_inputs),
        *(codes.stride(0), residual_or_out.stride(0)),
        BLOCK_ROWS=tile.rows,
        GROUP=_GROUP,
        **constants,
    )
    return out


def layout_constants(weight: PackedWeight, row_scales: torch.Tensor | None) -> dict[str, object]:
    """Return the kernels' compile-time constants for a weight and the scales of rows."""
    return {
        "CHUNK": weight.chunk,
        "GROUP_INPUTS": weight.group_inputs,
        "PACKED": weight.is_packed,
        "ZEROED": weight.zeros is not None,
        "OFFSETS": weight.offsets is not None,
        "ROUNDED": row_scales is not None,
        "ROW_GROUPED": row_scales is not None and len(row_scales) > 1,
    }
