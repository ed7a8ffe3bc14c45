"""Decoder that computes a whole step in one call."""

from __future__ import annotations

from typing import NamedTuple

import torch

from millrace.engine.adapters.packed import PackedAdapter, step_adapters
from millrace.engine.adapters.rows import AdapterWeights, RowAdapters
from millrace.engine.adapters.weights import LayerSlices
from millrace.engine.devices.cpu.attention import TorchAttention
from millrace.engine.devices.cpu.operations import CpuMetadata, CpuOperations
from millrace.engine.kernels.cpu import CpuKernels, DecoderShape, StepFeatures
from millrace.engine.kernels.operations import Collectives
from millrace.engine.kernels.ranks import SharedRanks
from millrace.engine.models.decoder import Decoder, DecoderWeights, LayerWeights
from millrace.engine.models.linears import PackedProjection, ReducedLinear
from millrace.engine.models.mlp import GatedMLP
from millrace.engine.step.batch import FlatBatch
from millrace.registry.checkpoints.checkpoint import ModelConfig


class _Layer(NamedTuple):
    weights: LayerWeights
    qkv: PackedProjection
    output: PackedProjection
    gate_up: PackedProjection
    down: PackedProjection


class FusedDecoder(Decoder[FlatBatch, CpuMetadata]):
    """Decoder with the results of ``Decoder``, computed in one call of the compiled kernels.

    Threads that sleep while they wait, as they do beside other processes, are woken once a step
    instead of once an operation.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        operations: CpuOperations,
        kernels: CpuKernels,
        ranks: SharedRanks | None = None,
    ) -> None:
        """Build the decoder; ``ranks`` have the other slices of these weights."""
        super().__init__(config, weights, operations, ranks)
        self._kernels = kernels
        self._ranks = ranks
        self._cpu_operations = operations
        layers = packed_layers(weights)
        assert layers is not None, "only packed layers with an MLP can be computed in one call"
        self._layers = _addresses(layers, operations)
        self._has_int8_cache = operations.attention.paged(0).is_int8
        self._shape = DecoderShape(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_attention_heads,
            num_key_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            block_size=operations.attention.block_size,
            epsilon=config.rms_norm_eps,
        )

    def adapter(self, layers: list[LayerSlices]) -> AdapterWeights:
        return PackedAdapter(layers)

    def forward_hidden(
        self, batch: FlatBatch, hidden: torch.Tensor, adapters: RowAdapters | None = None
    ) -> torch.Tensor:
        self._step(batch, hidden, adapters)
        return hidden

    def forward_with_features(
        self, batch: FlatBatch, adapters: RowAdapters | None, layers: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return hidden states as ``forward_hidden`` does, and the inputs of some layers.

        The features are [num_tokens, len(layers) * hidden_size] in the weights' dtype, layer by
        layer. The index after the last layer stands for the output of the last layer.
        """
        num_layers, width = len(self._layers), self._shape.hidden_size
        out = self._weights.embedding.new_empty(len(batch.token_ids), len(layers), width)
        hidden = self._embedded(batch.token_ids)
        self._step(batch, hidden, adapters, StepFeatures(torch.tensor(layers), out))
        for index, layer in enumerate(layers):
            if layer == num_layers:
                out[:, index] = hidden
        return hidden, out.flatten(1)

    def forward_from(
        self, batch: FlatBatch, hidden: torch.Tensor, inputs: torch.Tensor
    ) -> torch.Tensor:
        """Compute ``hidden``, float32 [num_tokens, hidden_size], in place.

        ``inputs`` are the inputs of the first attention.
        """
        self._step(batch, hidden, inputs=inputs)
        return hidden

    def _step(
        self,
        batch: FlatBatch,
        hidden: torch.Tensor,
        adapters: RowAdapters | None = None,
        features: StepFeatures | None = None,
        inputs: torch.Tensor | None = None,
    ) -> None:
        operations = self._cpu_operations
        rotation = self._rope.rotation(batch.positions)
        chunks = batch.ranges[batch.num_single :]
        self._kernels.decoder_step(
            self._layers,
            self._shape,
            hidden,
            (rotation.cosines.contiguous(), rotation.sines.contiguous()),
            operations.attention.slots(batch.ranges),
            operations.tables(batch.ranges),
            torch.tensor([chunk.start + chunk.num_tokens for chunk in chunks], dtype=torch.int64),
            has_int8_cache=self._has_int8_cache,
            adapters=None if adapters is None else step_adapters(adapters),
            features=features,
            inputs=inputs,
            ranks=self._ranks,
        )


def compiled_decoder(
    config: ModelConfig,
    weights: DecoderWeights,
    attention: TorchAttention,
    kernels: CpuKernels,
    collectives: Collectives | None = None,
) -> Decoder[FlatBatch, CpuMetadata]:
    """Build a decoder of the compiled kernels.

    A step is one call if its layers allow it, else one call per operation. ``collectives`` joins
    the ranks that have the other slices of the weights.
    """
    operations = CpuOperations(attention, kernels, epsilon=config.rms_norm_eps)
    ranks = collectives if isinstance(collectives, SharedRanks) else None
    if packed_layers(weights) is None or (collectives is not None and ranks is None):
        return Decoder(config, weights, operations, collectives)
    return FusedDecoder(config, weights, operations, kernels, ranks)


def packed_layers(weights: DecoderWeights) -> list[_Layer] | None:
    """Return the layers if all have packed weights and an MLP, else None."""
    layers = []
    for layer in weights.layers:
        mlp = layer.mlp
        if not isinstance(mlp, GatedMLP):
            return None
        linears = (layer.qkv, layer.output, mlp.gate_up, mlp.down)
        own = [one.linear if isinstance(one, ReducedLinear) else one for one in linears]
        packed = [linear for linear in own if isinstance(linear, PackedProjection)]
        if len(packed) < len(linears):
            return None
        layers.append(_Layer(layer, *packed))
    return layers


def _addresses(layers: list[_Layer], operations: CpuOperations) -> torch.Tensor:
    """Return the addresses of the layers' weights, see ``CpuKernels.decoder_step``."""
    rows = []
    for index, (weights, qkv, output, gate_up, down) in enumerate(layers):
        query_norm, key_norm = weights.head_norms or (None, None)
        norms = (weights.attention_norm, query_norm, key_norm, weights.mlp_norm)
        addresses = [
            *(0 if norm is None else norm.data_ptr() for norm in norms),
            *(linear.weight.address for linear in (qkv, output, gate_up, down)),
            operations.attention.paged(index).address,
        ]
        rows.append([*addresses, operations.attention.windows[index] or 0])
    return torch.tensor(rows, dtype=torch.int64)
