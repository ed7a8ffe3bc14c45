"""An EAGLE-3 head: one decoder layer that drafts from another model's hidden states."""

from __future__ import annotations

from typing import Generic, NamedTuple

import torch

from millrace.registry.checkpoints.eagle_head import EagleHeadConfig
from millrace.registry.checkpoints.tensors import TensorIndex
from millrace.schemas.errors import CheckpointError
from millrace.workers.kernels.operations import BatchT_contra, Linear, MetadataT, Operations
from millrace.workers.models.decoder import LayerWeights
from millrace.workers.models.loader import load_layer
from millrace.workers.models.mlp import plus_mlp
from millrace.workers.models.rope import Rope
from millrace.workers.models.weight_reader import Makers, WeightReader, linear_of

_INTEGERS = ("I64", "I32")


class EagleHeadWeights(NamedTuple):
    """``fusion`` makes the features of a token one hidden state. ``embedding``: [vocab_size,
    hidden_size]; the layer's attention norm is that of the embeddings. ``target_ids``: int64
    [draft_vocab_size], which token each output of ``head`` is for."""

    fusion: Linear
    embedding: torch.Tensor
    hidden_norm: torch.Tensor
    layer: LayerWeights
    final_norm: torch.Tensor
    head: Linear
    target_ids: torch.Tensor


class EagleHead(Generic[BatchT_contra, MetadataT]):
    """Computes flat batches in which a token stands beside the features of the token before it.

    What comes out for a token is what the head takes for its features where the target has not
    computed it; its logits are for the token behind it.
    """

    def __init__(
        self,
        config: EagleHeadConfig,
        weights: EagleHeadWeights,
        operations: Operations[BatchT_contra, MetadataT],
    ) -> None:
        self._weights = weights
        self._operations = operations
        self._rope = Rope(config, weights.embedding.device)
        self._norm_before_residual = config.norm_before_residual
        num_heads = config.num_attention_heads + 2 * config.num_key_value_heads
        self._heads_shape = (-1, num_heads, config.head_dim)
        self._vocab_size = config.vocab_size

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """[num_tokens, 3 * target_hidden_size] to [num_tokens, hidden_size]."""
        return self._weights.fusion(features)

    def forward(self, batch: BatchT_contra, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden`` [num_tokens, hidden_size], of the token before each, is overwritten by what
        comes out for it."""
        weights, operations = self._weights, self._operations
        layer = weights.layer
        metadata = operations.prepare(batch, self._rope.rotation(batch.positions))
        embedded = weights.embedding.index_select(0, batch.token_ids)
        normed = operations.rms_norm(hidden, weights.hidden_norm)
        both = torch.cat((operations.rms_norm(embedded, layer.attention_norm), normed), -1)
        heads = layer.qkv(both).view(self._heads_shape)
        attended = operations.attend(0, heads, None, metadata)
        total = normed if self._norm_before_residual else hidden
        total, normed = operations.add_norm(total, attended, layer.output, layer.mlp_norm)
        return plus_mlp(total, normed, layer.mlp, operations.swiglu)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_rows, vocab_size] of rows of ``forward``; -inf for tokens the head does not know."""
        weights = self._weights
        known = weights.head(self._operations.rms_norm(hidden, weights.final_norm))
        if known.shape[1] == self._vocab_size:
            return known
        logits = known.new_full((len(known), self._vocab_size), -torch.inf)
        return logits.index_copy_(1, weights.target_ids, known)


def load_eagle_head(
    tensors: TensorIndex,
    config: EagleHeadConfig,
    embedding: torch.Tensor,
    makers: Makers,
) -> EagleHeadWeights:
    """Read the tensors of a head on the CPU, in the dtype of its target's ``embedding``, which
    stands in where the head has none. Raises CheckpointError naming a tensor that is missing, has
    another shape than the config asks for, or has no place in a head."""
    reader = WeightReader(tensors, embedding.dtype, embedding.device, makers, None)
    hidden, prefix = config.hidden_size, config.layer_prefix
    target_ids = _target_ids(reader, tensors, config)
    if reader.has_weight("embed_tokens"):
        embedding = reader.tensor("embed_tokens.weight", (config.vocab_size, hidden))
    elif embedding.shape[1] != hidden:
        raise CheckpointError(
            f"Tensor embed_tokens.weight is missing from the checkpoint {tensors.path}: the "
            f"model's own embedding has {embedding.shape[1]} columns and the head takes {hidden}."
        )
    fusion = reader.weight("fc", hidden, 3 * config.target_hidden_size)
    head = reader.weight("lm_head", config.draft_vocab_size, hidden)
    weights = EagleHeadWeights(
        fusion=linear_of(fusion, None, makers, None),
        embedding=embedding,
        hidden_norm=reader.tensor(f"{prefix}hidden_norm.weight", (hidden,)),
        layer=load_layer(reader, config, prefix, num_inputs=2 * hidden),
        final_norm=reader.tensor("norm.weight", (hidden,)),
        head=linear_of(head, None, makers, None),
        target_ids=target_ids,
    )
    reader.refuse_leftovers()
    return weights


def _target_ids(
    reader: WeightReader, tensors: TensorIndex, config: EagleHeadConfig
) -> torch.Tensor:
    """Which token each of the draft's stands for; what t2d says is said by d2t, too."""
    size = config.draft_vocab_size
    draft_ids = torch.arange(size)
    reader.skip("t2d")
    if "d2t" not in tensors and size == config.vocab_size:
        return draft_ids
    target_ids = draft_ids + tensors.load("d2t", (size,), _INTEGERS).long()
    reader.skip("d2t")
    named = set(target_ids.tolist())
    if min(named) < 0 or max(named) >= config.vocab_size or len(named) < size:
        raise CheckpointError(
            f"Tensor d2t of {tensors.path} does not name {size} different tokens of the "
            f"vocabulary of {config.vocab_size}."
        )
    return target_ids
