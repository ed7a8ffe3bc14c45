"""The weights of an EAGLE-3 head: one decoder layer that drafts from another model's hidden
states."""

from __future__ import annotations

from typing import NamedTuple

import torch

from millrace.engine.kernels.operations import Linear
from millrace.engine.models.decoder import DecoderWeights
from millrace.engine.models.layer_loader import load_layer
from millrace.engine.models.weight_reader import Makers, WeightReader, linear_of
from millrace.registry.checkpoints.eagle_head import NUM_FEATURE_LAYERS, EagleHeadConfig
from millrace.registry.checkpoints.tensors import TensorIndex
from millrace.schemas.errors import CheckpointError

_INTEGERS = ("I64", "I32")


class EagleHeadWeights(NamedTuple):
    """``fusion`` makes the features of a token one hidden state. ``decoder`` is the one layer,
    whose attention norm is that of the embeddings, with a head for the draft's own tokens;
    ``target_ids``, int64 [draft_vocab_size], are which tokens these are."""

    fusion: Linear
    hidden_norm: torch.Tensor
    decoder: DecoderWeights
    target_ids: torch.Tensor


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
    fusion = reader.weight("fc", hidden, NUM_FEATURE_LAYERS * config.target_hidden_size)
    head = reader.weight("lm_head", config.draft_vocab_size, hidden)
    decoder = DecoderWeights(
        embedding=embedding,
        layers=(load_layer(reader, config, prefix, num_inputs=2 * hidden),),
        final_norm=reader.tensor("norm.weight", (hidden,)),
        head=linear_of(head, None, makers, None),
    )
    weights = EagleHeadWeights(
        fusion=linear_of(fusion, None, makers, None),
        hidden_norm=reader.tensor(f"{prefix}hidden_norm.weight", (hidden,)),
        decoder=decoder,
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
