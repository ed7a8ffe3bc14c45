"""Weights of an EAGLE-3 head: a decoder layer that drafts from another model's hidden states."""

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
    """Weights of an EAGLE-3 head.

    ``fusion`` maps the features of a token to a hidden state. ``decoder`` is the head's layer, with
    a head for the draft vocabulary; its attention norm is the norm of the embeddings.
    ``target_ids``, int64 [draft_vocab_size], maps draft tokens to the target's tokens.
    """

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
    """Read a head to the CPU in the dtype of its target's ``embedding``.

    The target's embedding replaces a missing one.

    Raises:
        CheckpointError: A tensor is missing, has another shape than the config, or is unknown. The
            message has its name.
    """
    reader = WeightReader(tensors, embedding.dtype, embedding.device, makers, None)
    hidden, prefix = config.hidden_size, config.layer_prefix
    target_ids = _target_ids(reader, tensors, config)
    if reader.has_weight("embed_tokens"):
        embedding = reader.tensor("embed_tokens.weight", (config.vocab_size, hidden))
    elif embedding.shape[1] != hidden:
        raise CheckpointError(
            f"Tensor embed_tokens.weight is missing from the checkpoint {tensors.path}, and the "
            f"model's own embedding has {embedding.shape[1]} columns instead of {hidden}."
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
    """Return the target's token of each draft token, by d2t; t2d is redundant and skipped."""
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
