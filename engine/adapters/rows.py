"""What adapters add to the rows of a batch, by torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from millrace.engine.adapters.weights import LayerSlices, LowRank
from millrace.engine.kernels.operations import Linear, SwiGLU


class AdapterWeights(Protocol):
    """An adapter as a decoder multiplies with it; ``num_weights`` are those of all its matrices."""

    @property
    def num_weights(self) -> int: ...


class PlainAdapter(NamedTuple):
    """For products by torch: its layers, in the decoder's dtype."""

    layers: Sequence[LayerSlices]

    @property
    def num_weights(self) -> int:
        return sum(
            matrix.a.numel() + matrix.b.numel()
            for layer in self.layers
            for product in layer
            for matrix in product
            if matrix is not None
        )


class RowAdapters(NamedTuple):
    """The adapters of a flat batch. ``of_rows``: int32 [num_tokens], which of ``weights`` each row
    has, -1 for none."""

    weights: Sequence[AdapterWeights]
    of_rows: torch.Tensor


class _Group(NamedTuple):
    """Rows (int64, their indices) of one adapter."""

    layers: Sequence[LayerSlices]
    rows: torch.Tensor


class AdaptedProducts:
    """The products of a batch with adapters: those of the layers, and what is added to them. Rows
    without an adapter are multiplied as ever."""

    def __init__(self, adapters: RowAdapters) -> None:
        self._groups: list[_Group] = []
        for index, weights in enumerate(adapters.weights):
            assert isinstance(weights, PlainAdapter)
            rows = (adapters.of_rows == index).nonzero()[:, 0]
            self._groups.append(_Group(weights.layers, rows))

    def qkv(self, layer: int, linear: Linear, rows: torch.Tensor) -> torch.Tensor:
        """[num_rows, num_inputs] to [num_rows, num_outputs], as ``linear`` does."""
        out = linear(rows)
        for group in self._groups:
            _add(group.layers[layer].qkv, group.rows, rows, out)
        return out

    def plus_output(
        self, layer: int, linear: Linear, total: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """``total`` and the product of ``rows``; ``total`` may be overwritten."""
        total = linear.plus(total, rows)
        for group in self._groups:
            _add(group.layers[layer].output, group.rows, rows, total)
        return total

    def gated(self, layer: int, linear: Linear, rows: torch.Tensor, swiglu: SwiGLU) -> torch.Tensor:
        """``swiglu`` of the product. Rows of an adapter are multiplied once more, since a linear
        map may apply it without rounding in between."""
        out = linear.gated(rows, swiglu)
        for group in self._groups:
            slices = group.layers[layer].gate_up
            if any(slices):
                own = rows.index_select(0, group.rows)
                gate_up = linear(own)
                _add(slices, None, own, gate_up)
                out.index_copy_(0, group.rows, swiglu(gate_up))
        return out

    def plus_down(
        self, layer: int, linear: Linear, total: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """As ``plus_output``, behind the MLP."""
        total = linear.plus(total, rows)
        for group in self._groups:
            _add(group.layers[layer].down, group.rows, rows, total)
        return total


def _add(
    slices: Sequence[LowRank | None],
    index: torch.Tensor | None,
    rows: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Add to the rows ``index`` of ``out``, or to all, what slices make of those of ``rows``."""
    present = [one for one in slices if one is not None]
    if not present:
        return
    inputs = rows if index is None else rows.index_select(0, index)
    outputs = out if index is None else out.index_select(0, index)
    # Matrices that are not there are as wide as one that is: keys as values, gates as what they
    # gate; and where queries alone are missing, what is left of the outputs is theirs.
    begin = 0
    for width, one in zip(_widths(slices, out.shape[1]), slices, strict=True):
        if one is not None:
            outputs[:, begin : begin + width] += (inputs @ one.a.t()) @ one.b.t()
        begin += width
    if index is not None:
        out.index_copy_(0, index, outputs)


def _widths(slices: Sequence[LowRank | None], num_outputs: int) -> list[int]:
    """How many outputs each matrix of a product has."""
    if len(slices) == 1:
        return [num_outputs]
    if len(slices) == 2:
        return [num_outputs // 2] * 2
    queries, keys, values = slices
    if queries is not None:
        num_queries = len(queries.b)
        num_keys = (num_outputs - num_queries) // 2
    else:
        one = keys or values
        assert one is not None
        num_keys = len(one.b)
        num_queries = num_outputs - 2 * num_keys
    return [num_queries, num_keys, num_keys]
