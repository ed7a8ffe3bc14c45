"""How products with quantized weights cut their work, by the shapes that are fixed for a model."""

from __future__ import annotations

from typing import NamedTuple


class RowProductTile(NamedTuple):
    """A program multiplies one row by ``outputs`` weights, ``chunks`` chunks of inputs at a time,
    the next ``num_stages`` - 1 times of which are on their way meanwhile."""

    outputs: int
    chunks: int
    num_warps: int
    num_stages: int


class QuantizedTile(NamedTuple):
    """A program takes ``rows`` by ``outputs`` results and a chunk of inputs at a time, the next
    ``num_stages`` - 1 of which are on their way meanwhile."""

    rows: int
    outputs: int
    num_warps: int
    num_stages: int


def row_product_tile(num_outputs: int, chunk_bytes: int) -> RowProductTile:
    """So few outputs that every processor has several programs, and 256 bytes of each output."""
    outputs = 16 if num_outputs >= 8192 else 8 if num_outputs >= 2048 else 4
    return RowProductTile(outputs, max(1, 256 // chunk_bytes), 4, 4)


def quantized_tile(num_rows: int, num_outputs: int, row_bytes: int) -> QuantizedTile:
    """Up to 16 rows reading the weights is the limit, and needs hundreds of programs; with more,
    widening the weights is, which more rows share. ``row_bytes``: of an element of a row.

    A chunk of codes is a fourth of one of wide weights: so much more of these is on the way where
    few outputs make few programs.
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
    """For any number of rows."""
    return QuantizedTile(16, 32, 4, 2) if row_bytes == 4 else QuantizedTile(64, 64, 4, 4)


def quantized_expert_tile(
    num_choices: int, num_experts: int, row_bytes: int, *, fixed: bool
) -> QuantizedTile:
    """By how many rows an expert has on average, which shapes tell. One for all if ``fixed``."""
    if fixed or row_bytes == 4:
        return fixed_quantized_tile(row_bytes)
    average = num_choices / num_experts
    if average <= 16:
        return QuantizedTile(16, 64, 4, 4)
    if average <= 64:
        return QuantizedTile(64, 64, 4, 4)
    # Places of rows take registers, too many for sums of 128 rows beside them.
    return QuantizedTile(64, 128, 8, 4)
