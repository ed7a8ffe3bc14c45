"""Tile shapes of the kernels, by the shapes of a model."""

from __future__ import annotations

from typing import NamedTuple


def power_of_two(count: int) -> int:
    """Return the smallest power of two at or above a positive ``count``."""
    return 1 << (count - 1).bit_length()


class RowTile(NamedTuple):
    """Tile of ``block`` neighbouring elements of a row, by ``num_warps`` warps."""

    block: int
    num_warps: int


def norm_tile(width: int) -> RowTile:
    """Return a tile of a whole row with up to 16 bytes per thread.

    No element has two threads, because one might read the sum that the other has written.
    """
    block = max(128, power_of_two(width))
    if block <= 1024:
        return RowTile(block, 4)
    if block <= 4096:
        return RowTile(block, 8)
    return RowTile(block, 16)


def swiglu_tile(width: int) -> RowTile:
    """Return a tile of a part of a row, so that a single row occupies several processors."""
    return RowTile(min(1024, power_of_two(width)), 4)


class HeadTile(NamedTuple):
    """Tile of ``heads`` heads of one token; ``half`` is the padded size of half a head."""

    heads: int
    half: int
    num_warps: int


def head_tile(head_dim: int) -> HeadTile:
    """Return a tile of at most 16 KiB of float32 in both halves together."""
    half = power_of_two(head_dim // 2)
    return HeadTile(max(1, 1024 // half), half, 4)


# Words of 8 bytes that a program of ``copy_blocks`` moves: eight loads of 16 bytes per thread.
COPY_WORDS = 2048
COPY_WARPS = 4


class ProductTile(NamedTuple):
    """Tile of a product: ``rows`` by ``outputs`` results, and ``inputs`` per turn of the loop.

    The inputs of the next ``num_stages`` - 1 turns are in flight.
    """

    rows: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


# Most rows whose product takes as long as reading the weights, in tiles of 16 rows.
MAX_SKINNY_ROWS = 16


# Tile for widths whose rows are not aligned to 16 bytes: elements are loaded one by one.
_ODD_TILE = ProductTile(16, 32, 64, 4, 2)


def product_tile(
    num_rows: int, num_outputs: int, num_inputs: int, element_bytes: int
) -> ProductTile:
    """Return the tile for a number of rows.

    One row is multiplied element by element; several use matrix units, which take 16. Up to
    MAX_SKINNY_ROWS, every processor needs tens of KiB of weights in flight, so there are few
    outputs per program and hundreds of programs. Within that, a tile has as many outputs as
    possible, because each program reads the rows again, from the cache.
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
    """Return the tile for any number of rows."""
    if num_inputs % 16:
        return _ODD_TILE
    if element_bytes == 4:
        return ProductTile(32, 32, 64, 4, 2)
    return ProductTile(64, 64, 128, 4, 3)


def gated_product_tile(
    num_rows: int, width: int, num_inputs: int, element_bytes: int
) -> ProductTile:
    """Return the tile for ``width`` gates and as many ups, half of a tile each.

    Tiles for many rows are smaller, because they have two sums in registers.
    """
    if num_rows > 64 and element_bytes == 2 and num_inputs % 16 == 0:
        return ProductTile(64, 64, 64, 4, 4)
    tile = product_tile(num_rows, 2 * width, num_inputs, element_bytes)
    if tile.rows == 1:
        return tile._replace(outputs=max(tile.outputs // 2, 4))
    # 16 outputs are enough work for two warps.
    outputs = max(tile.outputs // 2, 16)
    return tile._replace(outputs=outputs, num_warps=min(tile.num_warps, outputs // 8))
