"""Adapters on a device: their slots and the rows of a step that use them."""

from __future__ import annotations

import collections
from operator import attrgetter
from typing import NamedTuple

import torch

from millrace.engine.adapters.slots import AdapterSlots, Product, packed_slot
from millrace.engine.adapters.weights import read_adapter_weights
from millrace.engine.devices.cuda.device import Array, Device
from millrace.engine.devices.cuda.inputs import shifted
from millrace.engine.kernels.gpu.adapter_step import AdapterTiling
from millrace.engine.kernels.gpu.kernel_set import KernelSet
from millrace.engine.kernels.gpu.step_inputs import StepShape
from millrace.engine.models.adapted_linear import AddAdapters, adapted_weights
from millrace.engine.models.decoder import DecoderWeights
from millrace.engine.step.batch import BatchLayout
from millrace.registry.adapters import adapter_folder
from millrace.registry.checkpoints.adapters.outline import read_adapter_outline
from millrace.registry.checkpoints.checkpoint import ModelConfig
from millrace.registry.checkpoints.shard import WHOLE_MODEL, Shard
from millrace.schemas.models.adapters import AdapterRef

_adapter_weights = attrgetter("adapter_weights")


class SlotAdapter(NamedTuple):
    """Adapter in a slot; ``num_weights`` counts the elements of all its matrices."""

    slot: int
    num_weights: int


class DeviceAdapters:
    """Slots of adapters, and the buffer that tells a step's kernels which rows use which slot.

    ``AdapterPool`` decides which adapter is in which slot.
    """

    def __init__(
        self,
        config: ModelConfig,
        device: Device,
        slots: AdapterSlots,
        tiling: AdapterTiling,
        *,
        max_tokens: int,
        shard: Shard = WHOLE_MODEL,
    ) -> None:
        """Allocate the buffer; slots hold ``shard``'s part of adapters of the whole ``config``."""
        self._config = config
        self._shard = shard
        self._device = device
        self._slots = slots
        self._tiling = tiling
        longest = max(map(tiling.num_packed, range(1, max_tokens + 1)))
        self._packed = torch.zeros(longest, dtype=torch.int32, device=device.torch_device)
        # The device allocates its staging memory now, not while steps run.
        device.fill(slots.table, [torch.zeros(slots.table.shape, dtype=torch.int64)])

    def weights(self, weights: DecoderWeights, kernels: KernelSet) -> DecoderWeights:
        """Return ``weights`` with products that add the adapters of the current step.

        They must be multiplied by all rows of the step that ``tell`` was last called for.
        """

        def adder(layer: int, kind: Product) -> AddAdapters:
            product = self._slots.product(layer, kind)

            def add(rows: torch.Tensor, out: torch.Tensor) -> None:
                step = self._tiling.views(self._packed, len(rows))
                kernels.add_adapters(rows, out, product, step, self._tiling)

            return add

        return adapted_weights(weights, adder)

    def load(self, adapter: AdapterRef, slot: int, *, max_rank: int) -> SlotAdapter:
        """Read an adapter of at most ``max_rank`` into a slot.

        Raises:
            AdapterError: The adapter cannot be read or does not suit the model.
            ModelSourceError: The adapter's source cannot be read.
        """
        folder = adapter_folder(adapter.source, adapter.name, adapter.version)
        outline = read_adapter_outline(folder, self._config, max_rank)
        data, table = self._slots.data[slot], self._slots.table[slot]
        with torch.inference_mode():
            weights = read_adapter_weights(outline, self._config, data.dtype, self._shard)
            packed = packed_slot(weights)
            self._device.fill(data[: packed.num_elements], packed.parts)
            self._device.fill(table, [packed.numbers])
        return SlotAdapter(slot, packed.num_weights)

    def pack(self, layout: BatchLayout, shape: StepShape) -> Array:
        """Pack the adapters of the rows of a step padded to ``shape``."""
        return pack_adapters(layout, shape, self._tiling)

    def tell(self, packed: Array) -> None:
        """Copy the result of ``pack`` to the device."""
        self._device.write(self._packed[: len(packed)], packed)


def has_adapters(layout: BatchLayout) -> bool:
    """Return whether a row of the step has an adapter."""
    return any(map(_adapter_weights, layout.sequences))


def pack_adapters(layout: BatchLayout, shape: StepShape, tiling: AdapterTiling) -> Array:
    """Return ``AdapterTiling.pack`` of a step padded to ``shape``."""
    rows_of_slots: collections.defaultdict[int, list[int]] = collections.defaultdict(list)
    count = layout.num_single
    for row, weights in enumerate(map(_adapter_weights, layout.sequences[:count])):
        if weights is not None:
            rows_of_slots[weights.slot].append(row)
    for sequence, query in zip(layout.sequences[count:], layout.ranges[count:], strict=True):
        if sequence.adapter_weights is not None:
            first = shifted(query.start, layout, shape)
            rows_of_slots[sequence.adapter_weights.slot] += range(first, first + query.num_tokens)
    return tiling.pack(rows_of_slots, shape.num_tokens)
