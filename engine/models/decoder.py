"""Configurable decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU or experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)

from millrace.engine.adapters.rows import (
    AdaptedProducts,
    AdapterWeights,
    PlainAdapter,
    RowAdapters,
)
from millrace.engine.adapters.weights import LayerSlices
from millrace.engine.kernels.operations import (
    BatchT_contra,
    Collectives,
    HeadNorms,
    Linear,
    MetadataT,
    Operations,
    WeightSize,
    total_size,
)
from millrace.engine.models.linears import ReducedLinear
from millrace.engine.models.mlp import (
    MLP,
    GatedMLP,
    MixtureOfExperts,
    ReducedExperts,
    plus_mlp,
)
from millrace.engine.models.rope import Rope
from millrace.registry.checkpoints.checkpoint import ModelConfig
from millrace.registry.checkpoints.shard import WHOLE_MODEL, Shard, vocabulary_range


class LayerWeights(NamedTuple):
    """Weights of a layer; ``qkv`` yields query heads, key heads and value heads."""

    attention_norm: torch.Tensor
    qkv: Linear
    head_norms: HeadNorms | None
    output: Linear
    mlp_norm: torch.Tensor
    mlp: MLP

    @property
    def size(self) -> WeightSize:
        return total_size((self.qkv.size, self.output.size, self.mlp.size))


class DecoderWeights(NamedTuple):
    """Weights of a decoder.

    ``embedding`` is [vocab_size, hidden_size]. ``head`` yields logits, and is None in a checkpoint
    for embeddings or labels only. ``classifier`` is [num_labels, hidden_size] in float32, or None.

    One of several ranks has the embeddings and logits of its ``vocabulary_range``, and its own
    heads and slices of the other weights. Norms, routers and the classifier are on every rank. A
    pipeline stage has its layers. Only the first stage has embeddings; others have [0, hidden_size]
    of the same dtype and device. Only the last stage has ``head`` and ``final_norm``, which is [0]
    on others. The first and the last stage have ``classifier``.
    """

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: Linear | None
    classifier: torch.Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def size(self) -> WeightSize:
        """Size of the weights that a step may multiply with: layers and head."""
        layers = total_size(layer.size for layer in self.layers)
        return layers if self.head is None else layers.plus(self.head.size)


class Decoder(Generic[BatchT_contra, MetadataT]):
    """Decoder of flat batches; its only state between them is the KV cache of ``operations``.

    One of several ranks runs its share, by ``shard_config``, with its own ``weights``. All ranks of
    ``collectives`` run the same batches at the same time and have the same hidden states. A
    pipeline stage runs its layers: the first stage by ``forward``, later ones by ``forward_hidden``
    of the previous stage's output. Only the last stage calls ``normed`` and ``logits``; ``labels``
    is called by the first or the last.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        operations: Operations[BatchT_contra, MetadataT],
        collectives: Collectives | None = None,
    ) -> None:
        self._weights = weights
        self._operations = operations
        self._collectives = collectives
        shard = WHOLE_MODEL if collectives is None else Shard(collectives.rank, collectives.size)
        self._epsilon = config.rms_norm_eps
        self._first_token = vocabulary_range(config.vocab_size, shard).start
        self._rope = Rope(config, weights.embedding.device)
        num_heads = config.num_attention_heads + 2 * config.num_key_value_heads
        self._heads_shape = (-1, num_heads, config.head_dim)

    @property
    def dtype(self) -> torch.dtype:
        return self._weights.dtype

    @property
    def hidden_dtype(self) -> torch.dtype:
        """Dtype of the hidden states between layers: the weights', on a CPU at least float32."""
        if not self._operations.has_wide_residual:
            return self.dtype
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def embedding(self) -> torch.Tensor:
        """Embedding: [vocab_size, hidden_size], a rank's part, or no rows on later stages."""
        return self._weights.embedding

    @property
    def weight_size(self) -> WeightSize:
        """Size of the weights of layers and head."""
        return self._weights.size

    def expert_choices(self) -> tuple[int, ...]:
        """Return how often each expert was chosen for a row since the start, over these layers.

        Empty if there are no counts: without experts, or with stacked ones.
        """
        mixtures = [
            layer.mlp.mixture if isinstance(layer.mlp, ReducedExperts) else layer.mlp
            for layer in self._weights.layers
        ]
        loads = [
            mixture.load.choices
            for mixture in mixtures
            if isinstance(mixture, MixtureOfExperts) and mixture.load is not None
        ]
        return tuple(np.sum(loads, axis=0).tolist()) if loads else ()

    def forward(self, batch: BatchT_contra, adapters: RowAdapters | None = None) -> torch.Tensor:
        """Compute the hidden states of a batch: [num_tokens, hidden_size] in ``hidden_dtype``.

        Rows with one of ``adapters``, made by ``adapter``, are computed by its fine-tuned model.
        """
        return self.forward_hidden(batch, self._embedded(batch.token_ids), adapters)

    def forward_hidden(
        self, batch: BatchT_contra, hidden: torch.Tensor, adapters: RowAdapters | None = None
    ) -> torch.Tensor:
        """Apply the layers to ``hidden``, which may be overwritten.

        ``hidden`` is a contiguous [num_tokens, hidden_size] in ``hidden_dtype``. The batch's token
        ids are not read.
        """
        weights, operations = self._weights, self._operations
        metadata = operations.prepare(batch, self._rope.rotation(batch.positions))
        if adapters is not None:
            return self._forward_adapted(hidden, AdaptedProducts(adapters), metadata)
        last = len(weights.layers) - 1
        normed = operations.rms_norm(hidden, weights.layers[0].attention_norm)
        for index, layer in enumerate(weights.layers):
            heads = layer.qkv(normed).view(self._heads_shape)
            attended = operations.attend(index, heads, layer.head_norms, metadata)
            hidden, normed = operations.add_norm(hidden, attended, layer.output, layer.mlp_norm)
            if index == last:
                hidden = plus_mlp(hidden, normed, layer.mlp, operations.swiglu)
            else:
                following = weights.layers[index + 1].attention_norm
                hidden, normed = self._feed_forward(hidden, normed, layer.mlp, following)
        return hidden

    def _embedded(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Look up ``token_ids`` int64 [num_tokens]: [num_tokens, hidden_size]."""
        embedding = self._weights.embedding
        if self._collectives is None:
            return embedding.index_select(0, token_ids).to(self.hidden_dtype)
        own = token_ids - self._first_token
        is_elsewhere = (own < 0) | (own >= len(embedding))
        hidden = embedding.index_select(0, own.clamp(0, len(embedding) - 1))
        hidden.masked_fill_(is_elsewhere.unsqueeze(1), 0.0)
        self._collectives.all_reduce(hidden)
        return hidden.to(self.hidden_dtype)

    def _forward_adapted(
        self, hidden: torch.Tensor, products: AdaptedProducts, metadata: MetadataT
    ) -> torch.Tensor:
        """Apply the layers to a batch in which some rows have adapters."""
        operations = self._operations
        for index, layer in enumerate(self._weights.layers):
            normed = operations.rms_norm(hidden, layer.attention_norm)
            heads = products.qkv(index, layer.qkv, normed).view(self._heads_shape)
            attended = operations.attend(index, heads, layer.head_norms, metadata)
            hidden = _plus(products.plus_output, index, layer.output, hidden, attended)
            normed = operations.rms_norm(hidden, layer.mlp_norm)
            mlp = layer.mlp
            if isinstance(mlp, GatedMLP):
                gated = products.gated(index, mlp.gate_up, normed, operations.swiglu)
                hidden = _plus(products.plus_down, index, mlp.down, hidden, gated)
            else:
                hidden = plus_mlp(hidden, normed, mlp, operations.swiglu)
        return hidden

    def adapter(self, layers: list[LayerSlices]) -> AdapterWeights:
        """Convert an adapter's layers, in this dtype on the CPU, for ``forward``."""
        return PlainAdapter(layers)

    def _feed_forward(
        self,
        hidden: torch.Tensor,
        normed: torch.Tensor,
        mlp: MLP,
        following: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the hidden states after ``mlp``, and their norm by the ``following`` weight."""
        operations = self._operations
        if isinstance(mlp, GatedMLP):
            gated = mlp.gate_up.gated(normed, operations.swiglu)
            return operations.add_norm(hidden, gated, mlp.down, following)
        hidden = plus_mlp(hidden, normed, mlp, operations.swiglu)
        return hidden, operations.rms_norm(hidden, following)

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the final norm to rows of ``forward``, in ``hidden_dtype``, as for embeddings."""
        weight = self._weights.final_norm
        if not self._operations.has_wide_residual:
            return self._operations.rms_norm(hidden, weight)
        return F.rms_norm(hidden, weight.shape, weight.to(hidden.dtype), self._epsilon)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute logits, float32 [num_rows, vocab_size], of rows of ``forward``.

        They are the sums of the products without rounding: bfloat16 would make close logits equal.
        One of several ranks computes the logits of its own tokens.
        """
        assert self._weights.head is not None, "the checkpoint has no head for logits"
        normed = self._operations.rms_norm(hidden, self._weights.final_norm)
        return self._weights.head.unrounded(normed)

    def labels(self, normed: torch.Tensor) -> torch.Tensor:
        """Compute labels, float32 [num_rows, num_labels], of ``normed``, before any activation."""
        assert self._weights.classifier is not None, "the checkpoint has no classifier for labels"
        return F.linear(normed.float(), self._weights.classifier)


def _plus(
    product: Callable[[int, Linear, torch.Tensor, torch.Tensor], torch.Tensor],
    layer: int,
    linear: Linear,
    total: torch.Tensor,
    rows: torch.Tensor,
) -> torch.Tensor:
    """Return ``total`` plus the ``product`` of a layer's ``linear`` and ``rows``, with adapters.

    In a sum over ranks, adapters multiply this rank's inputs and are added to its part.
    """
    if not isinstance(linear, ReducedLinear):
        return product(layer, linear, total, rows)
    return linear.plus_parts(total, product(layer, linear.linear, torch.zeros_like(total), rows))
