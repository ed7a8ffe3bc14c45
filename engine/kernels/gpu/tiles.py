"""How the kernels cut their work, by the shapes that are fixed for a model."""

from __future__ import annotations

from typing import NamedTuple


def power_of_two(count: int) -> int:
    """The smallest power of two that is not below ``count``, which is positive."""
    return 1 << (count - 1).bit_length()


class RowTile(NamedTuple):
    """A program takes ``block`` neighbouring elements of a row with ``num_warps`` warps."""

    block: int
    num_warps: int


def norm_tile(width: int) -> RowTile:
    """A whole row, by as many threads as have 16 bytes of it each, within reason.

    No element has two threads, of which one might read a sum in place of what the other added to.
    """
    block = max(128, power_of_two(width))
    if block <= 1024:
        return RowTile(block, 4)
    if block <= 4096:
        return RowTile(block, 8)
    return RowTile(block, 16)


def swiglu_tile(width: int) -> RowTile:
    """Parts of a row: a single row occupies several processors."""
    return RowTile(min(1024, power_of_two(width)), 4)


class HeadTile(NamedTuple):
    """A program takes ``heads`` heads of one token; ``half`` is what half a head is padded to."""

    heads: int
    half: int
    num_warps: int


def head_tile(head_dim: int) -> HeadTile:
    """16 KiB of float32 at most, in both halves together."""
    half = power_of_two(head_dim // 2)
    return HeadTile(max(1, 1024 // half), half, 4)


# Words of 8 bytes that a program of ``copy_blocks`` moves: eight loads of 16 bytes a thread.
COPY_WORDS = 2048
COPY_WARPS = 4


class ProductTile(NamedTuple):
    """A program takes ``rows`` by ``outputs`` results and so many inputs at a time, the next
    ``num_stages`` - 1 times of which are on their way meanwhile."""

    rows: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


# The most rows whose product takes as long as reading the weights, even in tiles of 16 rows.
MAX_SKINNY_ROWS = 16


# For widths whose rows do not begin at multiples of 16 bytes: elements are then loaded one by one.
_ODD_TILE = ProductTile(16, 32, 64, 4, 2)


def product_tile(
    num_rows: int, num_outputs: int, num_inputs: int, element_bytes: int
) -> ProductTile:
    """One row is multiplied element by element, more by the matrix units, which take 16.

    Up to MAX_SKINNY_ROWS every processor needs tens of KiB of weights on their way, so there are
    few outputs a program, and hundreds of programs; and as many outputs as that allows, since
    each program reads the rows again, from the cache.
    """
    wide = 4 // element_bytes
    if num_inputs % 16:
        return _ODD_TILE
    if num_rows == 1:
        outputs = 16 if num_outputs >= 8192 else 8 if num_outputs >= 2048 else 4
        return ProductTile(1, outputs, 256 * wide, 4, 4)
    if num_rows <= MAX_SKINNY_ROWS:
        if num_outputs >= 16384:
            return ProductTile(16, 64, 64 * wide, 4, 4)
        if num_outputs >= 4096:
            return ProductTile(16, 32, 128 * wide, 4, 4)
        return ProductTile(16, 16, 128 * wide, 2, 4)
    if element_bytes == 4:
        return ProductTile(32, 64, 32, 4, 2)
    if num_rows <= 64:
        return ProductTile(64, 64, 128, 4, 4)
    if num_rows <= 512:
        return ProductTile(64, 128, 64, 4, 4)
    return ProductTile(128, 256, 64, 8, 3)


def fixed_product_tile(num_inputs: int, element_bytes: int) -> ProductTile:
    """For any number of rows."""
    if num_inputs % 16:
        return _ODD_TILE
    if element_bytes == 4:
        return ProductTile(32, 32, 64, 4, 2)
    return ProductTile(64, 64, 128, 4, 3)


def gated_product_tile(
    num_rows: int, width: int, num_inputs: int, element_bytes: int
) -> ProductTile:
    """For ``width`` gates and as many outputs that they gate: half of each in a tile, and smaller
    tiles for many rows, which have two sums in registers."""
    if num_rows > 64 and element_bytes == 2 and num_inputs % 16 == 0:
        return ProductTile(64, 64, 64, 4, 4)
    tile = product_tile(num_rows, 2 * width, num_inputs, element_bytes)
    if tile.rows == 1:
        return tile._replace(outputs=max(tile.outputs // 2, 4))
    # Two warps have enough to do with 16 outputs.
    outputs = max(tile.outputs // 2, 16)
    return tile._replace(outputs=outputs, num_warps=min(tile.num_warps, outputs // 8))
