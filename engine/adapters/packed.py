"""Adapter packed for the compiled step, see engine/kernels/native/adapters.h."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from millrace.engine.adapters.rows import PlainAdapter, RowAdapters
from millrace.engine.adapters.weights import LayerSlices, LowRank, contiguous
from millrace.engine.kernels.cpu import StepAdapters
from millrace.engine.kernels.packed_weight import PANEL_OUTPUTS

# Most slices of a product: queries, keys and values.
_MOST_SLICES: Final = 3
# Ranks of a slice are padded to a multiple of this.
_SLICE_RANKS: Final = 4
_PRODUCTS: Final = 4
# Numbers of an AdapterWeight: address and ranks of A; then per slice the address of B, its ranks
# and its first rank.
_NUMBERS: Final = 2 + 3 * _MOST_SLICES


class PackedAdapter:
    """Layers of one adapter in bfloat16, packed for the compiled step.

    ``address`` is the address of its table, valid while this object lives. ``most_ranks`` is the
    largest number of ranks of any product, padded to a multiple of 16.
    """

    def __init__(self, layers: Sequence[LayerSlices]) -> None:
        self._kept: list[torch.Tensor] = []
        self.most_ranks = 0
        self.num_weights = PlainAdapter(layers).num_weights
        rows = [[self._numbers(slices) for slices in layer] for layer in layers]
        self._numbers_of_layers = torch.tensor(rows, dtype=torch.int64).view(
            len(layers), _PRODUCTS, _NUMBERS
        )
        self.address: int = self._numbers_of_layers.data_ptr()

    def _numbers(self, slices: Sequence[LowRank | None]) -> list[int]:
        numbers = [0] * _NUMBERS
        present = [one for one in slices if one is not None]
        if not present:
            return numbers
        ranks = 0
        for index, one in enumerate(slices):
            if one is None:
                continue
            packed = self._keep(_packed_outputs(one.b))
            own_ranks = _filled_up(one.b.shape[1])
            numbers[2 + 3 * index : 5 + 3 * index] = [packed.data_ptr(), own_ranks, ranks]
            ranks += own_ranks
        stacked = torch.cat([_filled_up_rows(one.a, _SLICE_RANKS) for one in present])
        panels = self._keep(_in_panels(_filled_up_rows(stacked, PANEL_OUTPUTS)))
        numbers[:2] = [panels.data_ptr(), len(panels) * PANEL_OUTPUTS]
        self.most_ranks = max(self.most_ranks, numbers[1])
        return numbers

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = contiguous(tensor)
        self._kept.append(tensor)
        return tensor


def step_adapters(adapters: RowAdapters) -> StepAdapters:
    """Build the compiled step's table of a batch's adapters, which must all be packed."""
    packed = [one for one in adapters.weights if isinstance(one, PackedAdapter)]
    assert len(packed) == len(adapters.weights)
    return StepAdapters(
        torch.tensor([one.address for one in packed]),
        adapters.of_rows,
        max(one.most_ranks for one in packed),
    )


def _filled_up(number: int, multiple: int = _SLICE_RANKS) -> int:
    return -(-number // multiple) * multiple


def _filled_up_rows(a: torch.Tensor, multiple: int) -> torch.Tensor:
    return torch.nn.functional.pad(a, (0, 0, 0, _filled_up(len(a), multiple) - len(a)))


def _packed_outputs(b: torch.Tensor) -> torch.Tensor:
    return _in_panels(torch.nn.functional.pad(b, (0, _filled_up(b.shape[1]) - b.shape[1])))


def _in_panels(weight: torch.Tensor) -> torch.Tensor:
    """Pack [num_outputs, num_inputs] as [num_outputs / 16, num_inputs / 2, 16, 2]."""
    num_outputs, num_inputs = weight.shape
    panels = weight.view(num_outputs // PANEL_OUTPUTS, PANEL_OUTPUTS, num_inputs // 2, 2)
    return panels.transpose(1, 2)
