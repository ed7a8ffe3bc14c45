"""One configurable decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU or experts."""

from __future__ import annotations

from typing import Generic, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)

from registry.checkpoint import ModelConfig
from workers.engine.attention import AttentionBackend, MetadataT
from workers.engine.batch import FlatBatch
from workers.models.mlp import GatedMLP, MixtureOfExperts, add_mlp_
from workers.models.projection import Projection, project, project_onto_
from workers.models.rope import Rope, rotate_


class LayerWeights(NamedTuple):
    """One layer. ``qkv`` yields query heads, key heads, value heads. ``query_norm`` and
    ``key_norm`` ([head_dim]) come in pairs."""

    attention_norm: torch.Tensor
    qkv: Projection
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: Projection
    mlp_norm: torch.Tensor
    mlp: GatedMLP | MixtureOfExperts


class DecoderWeights(NamedTuple):
    """``embedding`` and ``head``: [vocab_size, hidden_size], the same tensor when tied; no head
    in a checkpoint that is for embeddings only."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: torch.Tensor | None

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype


class Decoder(Generic[MetadataT]):
    """Runs flat batches; what it remembers between them is in the attention backend's cache."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        attention: AttentionBackend[MetadataT],
    ) -> None:
        self._config = config
        self._weights = weights
        self._attention = attention
        self._rope = Rope(config, weights.embedding.device)
        self._num_rotated = config.num_attention_heads + config.num_key_value_heads
        self._num_heads_stored = self._num_rotated + config.num_key_value_heads

    def forward(self, batch: FlatBatch) -> torch.Tensor:
        """Logits of the sampled rows: [len(batch.sampled), vocab_size] in the weights' dtype."""
        weights = self._weights
        metadata = self._attention.prepare(batch)
        cosines, sines = self._rope.rotation(batch.positions, weights.dtype)
        hidden = weights.embedding.index_select(0, batch.token_ids)
        for index, layer in enumerate(weights.layers):
            normed = self._norm(hidden, layer.attention_norm)
            heads = project(normed, layer.qkv).view(
                -1, self._num_heads_stored, self._config.head_dim
            )
            self._norm_heads_(heads, layer)
            rotate_(heads[:, : self._num_rotated], cosines, sines)
            queries, keys_values = self._split(heads)
            attended = self._attention.attend(index, queries, keys_values, metadata)
            project_onto_(hidden, attended, layer.output)
            normed = self._norm(hidden, layer.mlp_norm)
            add_mlp_(hidden, normed, layer.mlp)
        hidden = hidden.index_select(0, batch.sampled_rows)
        assert weights.head is not None, "a checkpoint without a head was asked for logits"
        return F.linear(self._norm(hidden, weights.final_norm), weights.head)

    def _split(self, heads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        num_queries = self._config.num_attention_heads
        return heads[:, :num_queries], heads[:, num_queries:]

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden, weight.shape, weight, self._config.rms_norm_eps)

    def _norm_heads_(self, heads: torch.Tensor, layer: LayerWeights) -> None:
        """Normalise each query and each key head, in place."""
        if layer.query_norm is None or layer.key_norm is None:
            return
        num_queries = self._config.num_attention_heads
        queries = heads[:, :num_queries]
        queries.copy_(self._norm(queries, layer.query_norm))
        keys = heads[:, num_queries : self._num_rotated]
        keys.copy_(self._norm(keys, layer.key_norm))
