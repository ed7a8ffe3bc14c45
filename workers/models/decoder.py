"""One configurable decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU or experts."""

from __future__ import annotations

from typing import Generic, NamedTuple

import torch

from registry.checkpoint import ModelConfig
from workers.engine.batch import FlatBatch
from workers.engine.operations import HeadNorms, MetadataT, Operations
from workers.models.mlp import GatedMLP, MixtureOfExperts, plus_mlp
from workers.models.projection import Projection
from workers.models.rope import Rope


class LayerWeights(NamedTuple):
    """One layer. ``qkv`` yields query heads, key heads, value heads."""

    attention_norm: torch.Tensor
    qkv: Projection
    head_norms: HeadNorms | None
    output: Projection
    mlp_norm: torch.Tensor
    mlp: GatedMLP | MixtureOfExperts


class DecoderWeights(NamedTuple):
    """``embedding``: [vocab_size, hidden_size]; ``head`` yields logits, there is none in a
    checkpoint that is for embeddings only."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: Projection | None

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype


class Decoder(Generic[MetadataT]):
    """Runs flat batches; what it remembers between them is in the KV cache of ``operations``."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        operations: Operations[MetadataT],
    ) -> None:
        self._weights = weights
        self._operations = operations
        self._rope = Rope(config, weights.embedding.device)
        num_heads = config.num_attention_heads + 2 * config.num_key_value_heads
        self._heads_shape = (-1, num_heads, config.head_dim)

    def forward(self, batch: FlatBatch) -> torch.Tensor:
        """What the layers make of the batch: [num_tokens, hidden_size] in the weights' dtype."""
        weights, operations = self._weights, self._operations
        metadata = operations.prepare(batch, self._rope.rotation(batch.positions))
        hidden = weights.embedding.index_select(0, batch.token_ids)
        for index, layer in enumerate(weights.layers):
            normed = operations.rms_norm(hidden, layer.attention_norm)
            heads = layer.qkv(normed).view(self._heads_shape)
            attended = operations.attend(index, heads, layer.head_norms, metadata)
            hidden = layer.output.plus(hidden, attended)
            normed = operations.rms_norm(hidden, layer.mlp_norm)
            hidden = plus_mlp(hidden, normed, layer.mlp, operations.swiglu)
        return hidden

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows of ``forward`` behind the final norm, as embeddings are made of them."""
        return self._operations.rms_norm(hidden, self._weights.final_norm)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_rows, vocab_size] of rows of ``forward``, in the weights' dtype."""
        assert self._weights.head is not None, "a checkpoint without a head was asked for logits"
        return self._weights.head(self.normed(hidden))
