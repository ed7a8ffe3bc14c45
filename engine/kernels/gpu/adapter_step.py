"""Arguments of the kernels for adapters: one product's slots, and which rows have which slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

# Ranks in a slot are filled up to a multiple of this: what matrix units take.
RANK_MULTIPLE = 16
# Slices of a product: queries, keys and values; gates and what they gate.
MOST_SLICES = 3
# Of a product in a slot, see ``AdapterProduct``; a multiple of 16 bytes.
NUM_NUMBERS = 2 + 3 * MOST_SLICES + 1
# Of a tile, see ``AdaptedRows``.
TILE_NUMBERS = 4
_NO_SLOT = -1
# From here on the rows of an adapter fill larger tiles, and its weights are read less often.
_MANY_ROWS = 512


_Ints = npt.NDArray[np.int32]


class AdapterProduct(NamedTuple):
    """What adapters add to one product of a layer, in slots.

    ``data`` [num_slots, slot_size] holds matrices in the dtype that is computed in: A of all slices
    together, [ranks, num_inputs], and B of each, [its outputs, its ranks], with ranks of zeros up
    to multiples of RANK_MULTIPLE. ``table`` int64 [num_slots, NUM_NUMBERS], whose rows may lie
    apart, says where in its slot: the first element of A and the ranks; of each slice the first
    element of B, its ranks, which are 0 where the adapter changes nothing, and the first of them
    among the ranks of A; and a number that is not read.

    ``widths``: the outputs of each slice, those behind the first all of one width. ``max_ranks``
    that a slot has for all slices together.
    """

    data: torch.Tensor
    table: torch.Tensor
    num_inputs: int
    widths: tuple[int, ...]
    max_ranks: int


class AdaptedRows(NamedTuple):
    """Which rows of a step have an adapter, in buffers that stay where they are.

    Rows of one slot are cut into tiles. ``tiles``: int32 [num_tiles, TILE_NUMBERS], of each the
    slot, -1 where there is no tile, its first place in ``order``, how many rows it has, and a
    number that is not read. ``order``: int32 [num_rows], the rows that have adapters, those of one
    slot together; what lies behind them is not read.
    """

    tiles: torch.Tensor
    order: torch.Tensor


class AdapterTiling(NamedTuple):
    """How steps are cut: by the number of their rows alone, or, ``fixed``, by nothing, so that a
    row's result depends on no other row."""

    num_slots: int
    fixed: bool

    def tile_rows(self, num_rows: int) -> int:
        """The most rows of a tile."""
        return 16 if self.fixed or num_rows < _MANY_ROWS else 64

    def num_tiles(self, num_rows: int) -> int:
        """The most tiles there can be: each slot may have one that is not full, none is empty."""
        full = -(-num_rows // self.tile_rows(num_rows))
        return min(num_rows, full + self.num_slots - 1)

    def num_packed(self, num_rows: int) -> int:
        """Elements of the vector that ``pack`` makes."""
        return TILE_NUMBERS * self.num_tiles(num_rows) + num_rows

    def pack(self, rows_of_slots: Mapping[int, Sequence[int]], num_rows: int) -> _Ints:
        """The vector of a step in which each slot's adapter has some of ``num_rows`` rows."""
        packed: _Ints = np.full(self.num_packed(num_rows), _NO_SLOT, dtype=np.int32)
        end = TILE_NUMBERS * self.num_tiles(num_rows)
        tiles, order = packed[:end].reshape(-1, TILE_NUMBERS), packed[end:]
        size = self.tile_rows(num_rows)
        tile = place = 0
        for slot, rows in rows_of_slots.items():
            order[place : place + len(rows)] = rows
            for begin in range(0, len(rows), size):
                tiles[tile] = slot, place + begin, min(size, len(rows) - begin), 0
                tile += 1
            place += len(rows)
        return packed

    def views(self, packed: torch.Tensor, num_rows: int) -> AdaptedRows:
        """The step of ``num_rows`` rows that such a vector begins with."""
        end = TILE_NUMBERS * self.num_tiles(num_rows)
        return AdaptedRows(
            packed[:end].view(-1, TILE_NUMBERS), packed[end : self.num_packed(num_rows)]
        )
