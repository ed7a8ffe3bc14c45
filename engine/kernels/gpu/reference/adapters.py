"""What adapters add to products; which rows have them is read on the host."""

from __future__ import annotations

import torch

from millrace.engine.kernels.gpu.adapter_step import AdaptedRows, AdapterProduct, AdapterTiling


def add_adapters(
    rows: torch.Tensor,
    out: torch.Tensor,
    product: AdapterProduct,
    step: AdaptedRows,
    tiling: AdapterTiling,  # noqa: ARG001 (each row is computed by itself)
) -> None:
    """See ``engine.kernels.gpu.adapters``."""
    for slot, first, count, _ in step.tiles.tolist():
        if slot < 0:
            continue
        data, numbers = product.data[slot], product.table[slot].tolist()
        a = _matrix(data, numbers[0], numbers[1], product.num_inputs).float()
        begin = 0
        for index, width in enumerate(product.widths):
            place, ranks, first_rank = numbers[2 + 3 * index : 5 + 3 * index]
            if ranks:
                b = _matrix(data, place, width, ranks).float()
                for row in step.order[first : first + count].tolist():
                    # A copy of its own: how memory is aligned may decide how it is summed.
                    own_row = rows[row].to(torch.float32, copy=True)
                    shrunk = a[first_rank : first_rank + ranks] @ own_row
                    own = out[row, begin : begin + width]
                    own.copy_(own.float() + b @ shrunk.to(data.dtype).float())
            begin += width


def _matrix(data: torch.Tensor, place: int, height: int, width: int) -> torch.Tensor:
    return data[place : place + height * width].view(height, width)
