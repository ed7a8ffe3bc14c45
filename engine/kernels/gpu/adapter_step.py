"""Arguments of the kernels for adapters: a product's slots, and the slots of a step's rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

# Ranks in a slot are padded to a multiple of this, as matrix units require.
RANK_MULTIPLE = 16
# Most slices of a product: queries, keys and values.
MOST_SLICES = 3
# Numbers of a product in a slot, see ``AdapterProduct``; a multiple of 16 bytes.
NUM_NUMBERS = 2 + 3 * MOST_SLICES + 1
# Numbers of a tile, see ``AdaptedRows``.
TILE_NUMBERS = 4
_NO_SLOT = -1
# From this number on, rows use larger tiles, and an adapter's weights are read less often.
_MANY_ROWS = 512


_Ints = npt.NDArray[np.int32]


class AdapterProduct(NamedTuple):
    """Adapters of one product of a layer, in slots.

    ``data`` [num_slots, slot_size] holds matrices in the dtype of computation: A of all slices
    together, [ranks, num_inputs], then B of each slice, [its outputs, its ranks]. Ranks are padded
    with zeros to multiples of RANK_MULTIPLE.

    ``table``, int64 [num_slots, NUM_NUMBERS], may have strided rows. A row locates the matrices in
    the slot: the first element of A and its ranks; then for each slice the first element of B, its
    ranks (0 if the adapter has no matrix) and its first rank in A; and an unused number.

    ``widths`` gives the outputs of each slice; all slices after the first have one width.
    ``max_ranks`` is the maximum of ranks of all slices of a slot together.
    """

    data: torch.Tensor
    table: torch.Tensor
    num_inputs: int
    widths: tuple[int, ...]
    max_ranks: int


class AdaptedRows(NamedTuple):
    """Rows of a step that have an adapter, in buffers at fixed addresses.

    Rows of one slot are cut into tiles. ``tiles`` is int32 [num_tiles, TILE_NUMBERS]: each tile's
    slot (-1 for no tile), its first place in ``order``, its number of rows, and an unused number.
    ``order`` is int32 [num_rows], the rows with adapters grouped by slot; entries after these are
    not read.
    """

    tiles: torch.Tensor
    order: torch.Tensor


class AdapterTiling(NamedTuple):
    """Tiling of steps.

    It depends on the number of rows only. If ``fixed`` it depends on nothing, so that results are
    batch-invariant: a row's result does not depend on other rows.
    """

    num_slots: int
    fixed: bool

    def tile_rows(self, num_rows: int) -> int:
        """Return the most rows of a tile."""
        return 16 if self.fixed or num_rows < _MANY_ROWS else 64

    def num_tiles(self, num_rows: int) -> int:
        """Return the most tiles: each slot may have a partial tile, and none is empty."""
        full = -(-num_rows // self.tile_rows(num_rows))
        return min(num_rows, full + self.num_slots - 1)

    def num_packed(self, num_rows: int) -> int:
        """Return the number of elements that ``pack`` returns."""
        return TILE_NUMBERS * self.num_tiles(num_rows) + num_rows

    def pack(self, rows_of_slots: Mapping[int, Sequence[int]], num_rows: int) -> _Ints:
        """Pack the vector of a step in which each slot has some of ``num_rows`` rows."""
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
        """Return views of a vector of ``pack`` for a step of ``num_rows`` rows."""
        end = TILE_NUMBERS * self.num_tiles(num_rows)
        return AdaptedRows(
            packed[:end].view(-1, TILE_NUMBERS), packed[end : self.num_packed(num_rows)]
        )
