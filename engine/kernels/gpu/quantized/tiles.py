"""Tile shapes of products with quantized weights."""

from __future__ import annotations

from typing import NamedTuple


class RowProductTile(NamedTuple):
    """Tile shape of a product with one row.

    A program takes ``outputs`` weights and ``chunks`` chunks of inputs per turn, with the inputs of
    the next ``num_stages`` - 1 turns in flight.
    """

    outputs: int
    chunks: int
    num_warps: int
    num_stages: int


class QuantizedTile(NamedTuple):
    """Tile shape of a product.

    A program takes ``rows`` by ``outputs`` results and one chunk of inputs per turn, with the next
    ``num_stages`` - 1 chunks in flight.
    """

    rows: int
    outputs: int
    num_warps: int
    num_stages: int


def row_product_tile(num_outputs: int, chunk_bytes: int) -> RowProductTile:
    """Return a tile with few outputs, for several programs per processor, and 256 bytes of each."""
    outputs = 16 if num_outputs >= 8192 else 8 if num_outputs >= 2048 else 4
    return RowProductTile(outputs, max(1, 256 // chunk_bytes), 4, 4)


def quantized_tile(num_rows: int, num_outputs: int, row_bytes: int) -> QuantizedTile:
    """Return the tile for a number of rows; ``row_bytes`` is the size of an element of a row.

    Up to 16 rows, reading the weights is the limit, which needs hundreds of programs. With more
    rows, widening the weights is the limit, so more rows share it. A chunk of codes is a fourth of
    a chunk of wide weights, so more chunks are in flight if few outputs make few programs.
    """
    if row_bytes == 4:
        return QuantizedTile(16, 32, 4, 2)
    if num_rows <= 16:
        if num_outputs >= 16384:
            return QuantizedTile(16, 64, 4, 5)
        if num_outputs >= 4096:
            return QuantizedTile(16, 32, 4, 8)
        return QuantizedTile(16, 16, 2, 8)
    if num_rows <= 32:
        return QuantizedTile(32, 64, 4, 6)
    if num_rows <= 64:
        return QuantizedTile(64, 64, 4, 5)
    if num_rows <= 512:
        return QuantizedTile(64, 128, 8, 4)
    return QuantizedTile(128, 128, 8, 4)


def fixed_quantized_tile(row_bytes: int) -> QuantizedTile:
    """Return the tile for any number of rows."""
    return QuantizedTile(16, 32, 4, 2) if row_bytes == 4 else QuantizedTile(64, 64, 4, 4)


def quantized_expert_tile(
    num_choices: int, num_experts: int, row_bytes: int, *, fixed: bool
) -> QuantizedTile:
    """Return the tile by an expert's average rows, from the shapes; one for all if ``fixed``."""
    if fixed or row_bytes == 4:
        return fixed_quantized_tile(row_bytes)
    average = num_choices / num_experts
    if average <= 16:
        return QuantizedTile(16, 64, 4, 4)
    if average <= 64:
        return QuantizedTile(64, 64, 4, 4)
    # Places of rows take registers, so sums of 128 rows would not fit.
    return QuantizedTile(64, 128, 8, 4)
