"""One configurable decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU or experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple

import numpy as np
import torch

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
    """One layer. ``qkv`` yields query heads, key heads, value heads."""

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
    """``embedding``: [vocab_size, hidden_size]; ``head`` yields logits, there is none in a
    checkpoint that is for embeddings or labels only. ``classifier``: [num_labels, hidden_size] in
    float32, where there is one. A rank of several has the embeddings and the logits of its
    ``vocabulary_range`` only, and its own heads and slices of the rest; norms, routers and the
    classifier are on every rank. A stage has its layers; only the first one has embeddings, others
    have [0, hidden_size] of the same dtype and device; only the last one has a ``head``
    and the ``final_norm``, of which others have [0]; the first and the last have a
    ``classifier``."""

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
        """Of what a step may multiply with: layers and head."""
        layers = total_size(layer.size for layer in self.layers)
        return layers if self.head is None else layers.plus(self.head.size)


class Decoder(Generic[BatchT_contra, MetadataT]):
    """Runs flat batches; its only state between them is the KV cache of ``operations``.

    One rank of several runs what ``shard_config`` says, with the rank's ``weights``, beside all
    others of ``collectives``: each runs the same batches, and has the same hidden states. A stage
    runs its layers: the first one by ``forward``, each other by ``forward_hidden`` of what came out
    of the one before it; ``normed`` and ``logits`` are the last one's, and ``labels`` also the
    first one's.
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
        self._first_token = vocabulary_range(config.vocab_size, shard).start
        self._rope = Rope(config, weights.embedding.device)
        num_heads = config.num_attention_heads + 2 * config.num_key_value_heads
        self._heads_shape = (-1, num_heads, config.head_dim)

    @property
    def dtype(self) -> torch.dtype:
        return self._weights.dtype

    @property
    def embedding(self) -> torch.Tensor:
        """[vocab_size, hidden_size], or of a rank those of its tokens; of a later stage none."""
        return self._weights.embedding

    @property
    def weight_size(self) -> WeightSize:
        """Of layers and head."""
        return self._weights.size

    def expert_choices(self) -> tuple[int, ...]:
        """How often each expert was chosen for a row since the start, over the layers that are
        here; empty where nobody counts, as without experts or where they are stacked."""
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
        """The hidden states of the batch: [num_tokens, hidden_size] in the weights' dtype. Rows of
        ``adapters``, as ``adapter`` made them, are those of their fine-tuned models."""
        return self.forward_hidden(batch, self._embedded(batch.token_ids), adapters)

    def forward_hidden(
        self, batch: BatchT_contra, hidden: torch.Tensor, adapters: RowAdapters | None = None
    ) -> torch.Tensor:
        """What the layers make of ``hidden``, a contiguous [num_tokens, hidden_size] in the
        weights' dtype, which may be overwritten; of the batch its token ids are not read."""
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
        """[num_tokens, hidden_size] of ``token_ids`` int64 [num_tokens]."""
        embedding = self._weights.embedding
        if self._collectives is None:
            return embedding.index_select(0, token_ids)
        own = token_ids - self._first_token
        is_elsewhere = (own < 0) | (own >= len(embedding))
        hidden = embedding.index_select(0, own.clamp(0, len(embedding) - 1))
        hidden.masked_fill_(is_elsewhere.unsqueeze(1), 0.0)
        self._collectives.all_reduce(hidden)
        return hidden

    def _forward_adapted(
        self, hidden: torch.Tensor, products: AdaptedProducts, metadata: MetadataT
    ) -> torch.Tensor:
        """The same for a batch of which some rows have adapters."""
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
        """An adapter as ``forward`` takes it, of its layers in this dtype on the CPU."""
        return PlainAdapter(layers)

    def _feed_forward(
        self,
        hidden: torch.Tensor,
        normed: torch.Tensor,
        mlp: MLP,
        following: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The hidden states behind ``mlp``, and their norm by the ``following`` layer's weight."""
        operations = self._operations
        if isinstance(mlp, GatedMLP):
            gated = mlp.gate_up.gated(normed, operations.swiglu)
            return operations.add_norm(hidden, gated, mlp.down, following)
        hidden = plus_mlp(hidden, normed, mlp, operations.swiglu)
        return hidden, operations.rms_norm(hidden, following)

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows of ``forward`` behind the final norm, as embeddings are made of them."""
        return self._operations.rms_norm(hidden, self._weights.final_norm)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_rows, vocab_size] of rows of ``forward``, in the weights' dtype; of a rank the
        logits of its tokens."""
        assert self._weights.head is not None, "a checkpoint without a head was asked for logits"
        return self._weights.head(self.normed(hidden))

    def labels(self, normed: torch.Tensor) -> torch.Tensor:
        """[num_rows, num_labels] of rows of ``normed``, in float32, before any activation."""
        assert self._weights.classifier is not None, (
            "a checkpoint without labels was asked for them"
        )
        return torch.nn.functional.linear(normed.float(), self._weights.classifier)


def _plus(
    product: Callable[[int, Linear, torch.Tensor, torch.Tensor], torch.Tensor],
    layer: int,
    linear: Linear,
    total: torch.Tensor,
    rows: torch.Tensor,
) -> torch.Tensor:
    """``total`` and the ``product`` of a layer's ``linear`` and ``rows``, with what adapters add;
    of a sum over ranks that is added to each rank's part, of whose inputs the adapters' are."""
    if not isinstance(linear, ReducedLinear):
        return product(layer, linear, total, rows)
    return linear.plus_parts(total, product(layer, linear.linear, torch.zeros_like(total), rows))
