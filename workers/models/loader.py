"""From a checkpoint folder in Hugging Face layout to a decoder's weights."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from millrace.registry.checkpoints.checkpoint import ModelConfig, open_tensors
from millrace.registry.checkpoints.expert_layers import ExpertsConfig
from millrace.registry.checkpoints.families import Experts, family_of
from millrace.registry.checkpoints.side_files import ignored_parts
from millrace.schemas.errors import ConfigError
from millrace.workers.kernels.operations import HeadNorms
from millrace.workers.models.decoder import DecoderWeights, LayerWeights
from millrace.workers.models.mlp import MLP, GatedMLP, MixtureOfExperts
from millrace.workers.models.projection import Projection
from millrace.workers.models.stacked_experts import StackedExperts
from millrace.workers.models.weight_reader import (
    MakeExperts,
    MakeLinear,
    Makers,
    TensorSource,
    WeightReader,
    linear_of,
)
from millrace.workers.quantization.at_load import Quantize
from millrace.workers.quantization.device_experts import MakeStack
from millrace.workers.quantization.linear import DequantizedLinear, MakeQuantized
from millrace.workers.quantization.weight import QuantizedWeight

__all__ = [
    "MakeExperts",
    "MakeLinear",
    "Quantize",
    "TensorSource",
    "choose_dtype",
    "is_widened",
    "load_layer",
    "load_weights",
    "num_parameters",
]

_log = logging.getLogger(__name__)

_PREFIX = "model."
_EMBEDDING, _HEAD = "embed_tokens", "lm_head"
_CLASSIFIER = "score.weight"
_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
# Up to here float32 is affordable on a CPU, where no compiled kernels multiply in bfloat16. It buys
# tokens that do not change with the company: bfloat16 rounds so coarsely that a batch of another
# size, hence another kernel, tips close draws.
_WIDEN_MAX_PARAMETERS = 32_000_000


class _MLPNames(NamedTuple):
    gate: str
    up: str
    down: str


_USUAL_NAMES = _MLPNames("gate_proj", "up_proj", "down_proj")
_MIXTRAL_NAMES = _MLPNames("w1", "w3", "w2")


def choose_dtype(
    config: ModelConfig, dtype: str, device: torch.device, *, packs: bool = False
) -> torch.dtype:
    """The dtype to compute in: ``dtype`` by name, or for "auto" the checkpoint's own.

    "auto" on a CPU widens a small checkpoint to float32, which loses nothing of it; but weights
    that are quantized, or that it ``packs`` for the kernels, are multiplied in bfloat16, as they
    do. Raises ConfigError for an unknown name.
    """
    if dtype == "auto":
        if device.type == "cpu" and (packs or config.quantization is not None):
            return torch.bfloat16
        if is_widened(config, device):
            return torch.float32
        return _DTYPES[config.dtype]
    if dtype not in _DTYPES:
        raise ConfigError(f"engine.dtype is {dtype!r}; choose auto, {', '.join(_DTYPES)}.")
    return _DTYPES[dtype]


def is_widened(config: ModelConfig, device: torch.device) -> bool:
    """Whether "auto" computes a checkpoint in float32, whatever its own dtype is."""
    return device.type == "cpu" and num_parameters(config) <= _WIDEN_MAX_PARAMETERS


def num_parameters(config: ModelConfig) -> int:
    """How many weights the decoder has, norms and biases left out."""
    heads = 2 * (config.num_attention_heads + config.num_key_value_heads)
    attention = heads * config.head_dim * config.hidden_size
    mlps = config.num_hidden_layers * 3 * config.hidden_size * config.intermediate_size
    if config.experts is not None:
        each = 3 * config.experts.intermediate_size + 1
        mixture = config.experts.num_experts * each - 3 * config.intermediate_size
        mlps += len(config.experts.layers) * config.hidden_size * mixture
    vocabulary = config.vocab_size * config.hidden_size
    num_vocabularies = 2 if config.has_head and not config.tie_word_embeddings else 1
    return config.num_hidden_layers * attention + mlps + num_vocabularies * vocabulary


def load_weights(
    path: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    source: TensorSource | None = None,
    product: MakeLinear = Projection,
    experts: MakeExperts | None = None,
    quantized: MakeQuantized | None = None,
    quantize: Quantize | None = None,
    quantize_head: Quantize | None = None,
    stacks: MakeStack | None = None,
) -> DecoderWeights:
    """Read every tensor that ``config`` asks for, with q, k, v and gate, up fused, from ``source``
    or the checkpoint at ``path``; linear maps are made by ``product``, mixtures by ``experts``, or
    of one product after the other. What of the checkpoint is ignored is logged.

    Linear maps with quantized weights are made by ``quantized``, of weights in ``dtype`` if that is
    None, and those of mixtures by ``experts`` by ``stacks``. Wide weights of attention, MLPs and
    experts go through ``quantize`` first, that of the head through ``quantize_head``; but experts
    of mixtures stay wide without ``stacks``. Weights of ``source`` are wide.

    Raises CheckpointError naming a tensor that is missing, has another shape than the config asks
    for (with both shapes), or is in the checkpoint but has no place in this decoder; ConfigError
    for quantizing what is quantized already.
    """
    if config.quantization is not None and (quantize or quantize_head):
        raise ConfigError(
            f"{path} is quantized already, by {config.quantization.method}: leave --quantization "
            "out, or name the checkpoint that it was made from."
        )
    makers = Makers(
        product, quantized or partial(DequantizedLinear, dtype=dtype), quantize, experts, stacks
    )
    index: TensorSource
    if source is None:
        index = open_tensors(path)
        for sentence in ignored_parts(path):
            _log.warning(sentence)
    else:
        index = source
    # Checkpoints of embedding models leave the prefix out.
    prefix = _PREFIX if any(name.startswith(_PREFIX) for name in index) else ""
    quantization = config.quantization if source is None else None
    reader = WeightReader(index, dtype, device, makers, quantization)
    hidden, vocabulary = config.hidden_size, config.vocab_size
    embedding = reader.widened(prefix + _EMBEDDING, vocabulary, hidden, is_looked_up=True)
    layers = tuple(
        load_layer(reader, config, f"{prefix}layers.{number}.", number=number)
        for number in range(config.num_hidden_layers)
    )
    final_norm = reader.tensor(prefix + "norm.weight", (hidden,))
    head = None
    if config.has_head:
        weight = _head_weight(reader, config, embedding)
        head = linear_of(weight, None, makers, quantize_head)
    else:
        reader.skip_weight(_HEAD)
    classifier = None
    if config.classifier is not None:
        shape = (len(config.classifier.labels), hidden)
        classifier = reader.tensor(_CLASSIFIER, shape).float()
    reader.refuse_leftovers()
    return DecoderWeights(embedding, layers, final_norm, head, classifier)


def _head_weight(
    reader: WeightReader, config: ModelConfig, embedding: torch.Tensor
) -> torch.Tensor | QuantizedWeight:
    """The embedding itself where they are tied; unless the file holds another head, which
    transformers then goes by."""
    if config.tie_word_embeddings and not reader.has_weight(_HEAD):
        return embedding
    head = reader.weight(_HEAD, config.vocab_size, config.hidden_size)
    if not config.tie_word_embeddings:
        return head
    if isinstance(head, torch.Tensor) and torch.equal(head, embedding):
        return embedding
    _log.warning(
        "%s: config.json's tie_word_embeddings is not followed, as the checkpoint has a tensor "
        "%s of its own, which differs from the embedding",
        reader.path,
        _HEAD,
    )
    return head


def load_layer(
    reader: WeightReader,
    config: ModelConfig,
    prefix: str,
    *,
    number: int = 0,
    num_inputs: int | None = None,
) -> LayerWeights:
    """The layer of this number, whose tensors begin with ``prefix``; its attention has so many
    inputs, the hidden size unless said otherwise."""
    hidden = config.hidden_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    attention = prefix + "self_attn."
    head_norms = None
    if config.qk_norm:
        shape = (config.head_dim,)
        head_norms = HeadNorms(
            reader.tensor(attention + "q_norm.weight", shape),
            reader.tensor(attention + "k_norm.weight", shape),
        )
    reader.skip(attention + "rotary_emb.inv_freq")
    return LayerWeights(
        attention_norm=reader.tensor(prefix + "input_layernorm.weight", (hidden,)),
        qkv=reader.fused(
            attention,
            {"q_proj": queries, "k_proj": keys, "v_proj": keys},
            num_inputs=num_inputs or hidden,
            bias=config.attention_bias,
        ),
        head_norms=head_norms,
        output=reader.fused(
            attention, {"o_proj": hidden}, num_inputs=queries, bias=config.attention_output_bias
        ),
        mlp_norm=reader.tensor(prefix + "post_attention_layernorm.weight", (hidden,)),
        mlp=_load_mlp(reader, config, number, prefix),
    )


def _load_mlp(reader: WeightReader, config: ModelConfig, number: int, prefix: str) -> MLP:
    hidden = config.hidden_size
    if config.experts is not None and number in config.experts.layers:
        return _load_experts(reader, config, config.experts, prefix)
    return _load_gated(
        reader,
        prefix + "mlp.",
        _USUAL_NAMES,
        hidden,
        config.intermediate_size,
        has_bias=config.mlp_bias,
    )


def _load_experts(
    reader: WeightReader, config: ModelConfig, experts: ExpertsConfig, prefix: str
) -> MixtureOfExperts | StackedExperts:
    family = family_of(config.architecture)
    is_mixtral = family is not None and family.experts is Experts.MIXTRAL
    block = prefix + ("block_sparse_moe." if is_mixtral else "mlp.")
    names = _MIXTRAL_NAMES if is_mixtral else _USUAL_NAMES
    hidden, inner = config.hidden_size, experts.intermediate_size
    router = reader.widened(block + "gate", experts.num_experts, hidden)
    prefixes = [f"{block}experts.{expert}." for expert in range(experts.num_experts)]
    make = reader.makers.experts
    if make is not None:
        gate_up = reader.stack(prefixes, {names.gate: inner, names.up: inner}, num_inputs=hidden)
        down = reader.stack(prefixes, {names.down: hidden}, num_inputs=inner)
        return make(router, gate_up, down, experts)
    return MixtureOfExperts(
        router=router,
        experts=tuple(
            _load_gated(reader, own, names, hidden, inner, has_bias=False) for own in prefixes
        ),
        num_chosen=experts.num_chosen,
        normalized=experts.normalized,
    )


def _load_gated(
    reader: WeightReader, prefix: str, names: _MLPNames, hidden: int, inner: int, *, has_bias: bool
) -> GatedMLP:
    return GatedMLP(
        gate_up=reader.fused(
            prefix, {names.gate: inner, names.up: inner}, num_inputs=hidden, bias=has_bias
        ),
        down=reader.fused(prefix, {names.down: hidden}, num_inputs=inner, bias=has_bias),
    )
