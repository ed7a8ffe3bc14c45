"""Adapters in slots of a device's memory, in the layout of its kernels."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)

from millrace.engine.adapters.rows import PlainAdapter
from millrace.engine.adapters.weights import LayerSlices, LowRank
from millrace.engine.kernels.gpu.adapter_step import NUM_NUMBERS, RANK_MULTIPLE, AdapterProduct
from millrace.registry.checkpoints.checkpoint import ModelConfig


class Product(IntEnum):
    """The products of a layer, in the order of ``LayerSlices``."""

    QKV = 0
    OUTPUT = 1
    GATE_UP = 2
    DOWN = 3


class PackedSlot(NamedTuple):
    """Adapter on the host in the layout of a slot.

    The contiguous ``parts`` follow each other in the slot. ``numbers``, int64 [num_layers,
    len(Product), NUM_NUMBERS], locates the matrices in it.
    """

    parts: list[torch.Tensor]
    numbers: torch.Tensor
    num_weights: int

    @property
    def num_elements(self) -> int:
        return sum(part.numel() for part in self.parts)


class _Shape(NamedTuple):
    """Shape of a product: its inputs and the outputs of each slice."""

    num_inputs: int
    widths: tuple[int, ...]


class AdapterSlots:
    """Memory for ``num_slots`` adapters of ranks up to ``max_rank``, at a fixed address.

    Steps read ``data`` [num_slots, slot_size] and ``table`` int64 [num_slots, num_layers,
    len(Product), NUM_NUMBERS]. The owner decides when a slot may be written. An adapter fills its
    slot from the beginning, with its own ranks.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._shapes = _shapes(config)
        self._max_rank = _filled_up(max_rank)
        size = slot_elements(config, max_rank)
        self.data = torch.zeros(num_slots, size, dtype=dtype, device=device)
        self.table = torch.zeros(
            (num_slots, config.num_hidden_layers, len(Product), NUM_NUMBERS),
            dtype=torch.int64,
            device=device,
        )

    def product(self, layer: int, product: Product) -> AdapterProduct:
        """Return the kernels' arguments for one product of a layer, valid for any adapters."""
        shape = self._shapes[product]
        return AdapterProduct(
            data=self.data,
            table=self.table[:, layer, product],
            num_inputs=shape.num_inputs,
            widths=shape.widths,
            max_ranks=self._max_rank * len(shape.widths),
        )


def slot_elements(config: ModelConfig, max_rank: int) -> int:
    """Return the number of elements of a slot with every projection at ``max_rank``."""
    experts = () if config.experts is None else config.experts.layers
    return _filled_up(max_rank) * sum(
        shape.num_inputs * len(shape.widths) + sum(shape.widths)
        for layer in range(config.num_hidden_layers)
        for product, shape in _shapes(config).items()
        if layer not in experts or product < Product.GATE_UP
    )


def packed_slot(layers: Sequence[LayerSlices]) -> PackedSlot:
    """Pack ``layers`` of an adapter for a slot: contiguous matrices in one dtype on the host."""
    parts: list[torch.Tensor] = []
    numbers: list[list[list[int]]] = []
    place = 0
    for layer in layers:
        of_layer = []
        for slices in layer:
            of_product, added = _packed(slices, place)
            of_layer.append(of_product)
            parts += added
            place += sum(part.numel() for part in added)
        numbers.append(of_layer)
    table = torch.tensor(numbers, dtype=torch.int64)
    return PackedSlot(parts, table, PlainAdapter(layers).num_weights)


def _packed(slices: Sequence[LowRank | None], place: int) -> tuple[list[int], list[torch.Tensor]]:
    """Return the numbers of a product's matrices from ``place`` on, and all A, then each B."""
    numbers = [0] * NUM_NUMBERS
    numbers[0] = place
    present = [(index, one) for index, one in enumerate(slices) if one is not None]
    parts = []
    for index, one in present:
        parts.append(_filled_up_ranks(one.a, 0))
        numbers[3 + 3 * index : 5 + 3 * index] = [len(parts[-1]), numbers[1]]
        numbers[1] += len(parts[-1])
    place += sum(part.numel() for part in parts)
    for index, one in present:
        parts.append(_filled_up_ranks(one.b, 1))
        numbers[2 + 3 * index] = place
        place += parts[-1].numel()
    return numbers, parts


def _filled_up_ranks(matrix: torch.Tensor, dimension: int) -> torch.Tensor:
    missing = _filled_up(matrix.shape[dimension]) - matrix.shape[dimension]
    if not missing:
        return matrix
    return F.pad(matrix, (0, missing) if dimension else (0, 0, 0, missing))


def _filled_up(rank: int) -> int:
    return -(-rank // RANK_MULTIPLE) * RANK_MULTIPLE


def _shapes(config: ModelConfig) -> dict[Product, _Shape]:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    return {
        Product.QKV: _Shape(hidden, (queries, keys, keys)),
        Product.OUTPUT: _Shape(queries, (hidden,)),
        Product.GATE_UP: _Shape(hidden, (inner, inner)),
        Product.DOWN: _Shape(inner, (hidden,)),
    }
