"""Products of adapters for the rows of a batch, computed by torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from millrace.engine.adapters.weights import LayerSlices, LowRank
from millrace.engine.kernels.operations import Linear, SwiGLU


class AdapterWeights(Protocol):
    """Adapter in a decoder's format; ``num_weights`` counts the elements of all its matrices."""

    @property
    def num_weights(self) -> int: ...


class PlainAdapter(NamedTuple):
    """Adapter for products by torch: its layers in the decoder's dtype."""

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
    """Adapters of a flat batch.

    ``of_rows``, int32 [num_tokens], gives each row's index into ``weights``, or -1 for none.
    """

    weights: Sequence[AdapterWeights]
    of_rows: torch.Tensor


class _Group(NamedTuple):
    """Rows of one adapter: their indices, int64."""

    layers: Sequence[LayerSlices]
    rows: torch.Tensor


class AdaptedProducts:
    """Products of a batch with adapters: the layers' products plus the adapters' products.

    Rows without an adapter get the layer's product alone.
    """

    def __init__(self, adapters: RowAdapters) -> None:
        self._groups: list[_Group] = []
        for index, weights in enumerate(adapters.weights):
            assert isinstance(weights, PlainAdapter)
            rows = (adapters.of_rows == index).nonzero()[:, 0]
            self._groups.append(_Group(weights.layers, rows))

    def qkv(self, layer: int, linear: Linear, rows: torch.Tensor) -> torch.Tensor:
        """Multiply [num_rows, num_inputs] to [num_rows, num_outputs], adapters included."""
        out = linear(rows)
        for group in self._groups:
            _add(group.layers[layer].qkv, group.rows, rows, out)
        return out

    def plus_output(
        self, layer: int, linear: Linear, total: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """Return ``total`` plus the product of ``rows``; may overwrite ``total``."""
        total = linear.plus(total, rows)
        for group in self._groups:
            _add(group.layers[layer].output, group.rows, rows, total)
        return total

    def gated(self, layer: int, linear: Linear, rows: torch.Tensor, swiglu: SwiGLU) -> torch.Tensor:
        """Return ``swiglu`` of the product.

        Rows with an adapter are multiplied a second time, because ``linear`` may apply ``swiglu``
        before it rounds the product.
        """
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
        """Return ``total`` plus the down projection of ``rows``, like ``plus_output``."""
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
    """Add the slices' products of ``rows`` to ``out``, at the rows ``index`` or at all rows."""
    present = [one for one in slices if one is not None]
    if not present:
        return
    inputs = rows if index is None else rows.index_select(0, index)
    outputs = out if index is None else out.index_select(0, index)
    # The width of a missing matrix is derived: keys are as wide as values, gates as wide as ups,
    # and queries take the remaining outputs.
    begin = 0
    for width, one in zip(_widths(slices, out.shape[1]), slices, strict=True):
        if one is not None:
            outputs[:, begin : begin + width] += (inputs @ one.a.t()) @ one.b.t()
        begin += width
    if index is not None:
        out.index_copy_(0, index, outputs)


def _widths(slices: Sequence[LowRank | None], num_outputs: int) -> list[int]:
    """Return the number of outputs of each matrix of a product."""
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
