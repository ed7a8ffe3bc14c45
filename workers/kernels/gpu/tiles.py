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
    """A whole row, by as many threads as have 16 bytes of it each, within reason."""
    block = power_of_two(width)
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
