"""Loader of a decoder's weights from a checkpoint folder in Hugging Face layout."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import torch

from millrace.engine.kernels.operations import Collectives
from millrace.engine.models.decoder import DecoderWeights, LayerWeights
from millrace.engine.models.gguf_tensors import GgufTensors
from millrace.engine.models.layer_loader import load_layer
from millrace.engine.models.linears import Projection
from millrace.engine.models.weight_reader import (
    MakeExperts,
    MakeLinear,
    Makers,
    TensorSource,
    WeightReader,
    linear_of,
)
from millrace.engine.quantization.device_experts import MakeStack
from millrace.engine.quantization.linear import DequantizedLinear, MakeQuantized
from millrace.engine.quantization.rounding import Quantize
from millrace.engine.quantization.weight import QuantizedWeight
from millrace.registry.checkpoints.checkpoint import ModelConfig, gguf_parts, open_tensors
from millrace.registry.checkpoints.shard import (
    WHOLE_MODEL,
    Shard,
    layer_weights,
    stage_layers,
    vocabulary_slice,
)
from millrace.registry.checkpoints.side_files import ignored_parts
from millrace.runtime.process import release_free_memory
from millrace.schemas.errors import ConfigError

_log = logging.getLogger(__name__)

_PREFIX = "model."
_EMBEDDING, _HEAD = "embed_tokens", "lm_head"
_FINAL_NORM, _CLASSIFIER = "norm.weight", "score.weight"
_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
# Most parameters that "auto" computes in float32 on a CPU without compiled bfloat16 products.
# float32 makes tokens independent of the batch: bfloat16 rounds so coarsely that another batch
# size, hence another kernel, changes close draws.
_WIDEN_MAX_PARAMETERS = 32_000_000


def choose_dtype(
    config: ModelConfig, dtype: str, device: torch.device, *, packs: bool = False
) -> torch.dtype:
    """Return the dtype of computation: ``dtype`` by name, or for "auto" the checkpoint's own.

    On a CPU, "auto" widens a small checkpoint to float32, which is exact. But quantized weights,
    and weights that the kernels pack (``packs``), are multiplied in bfloat16, their own dtype.

    Raises:
        ConfigError: The name is unknown.
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
    """Return whether "auto" computes a checkpoint in float32, independent of its dtype."""
    return device.type == "cpu" and num_parameters(config) <= _WIDEN_MAX_PARAMETERS


def num_parameters(config: ModelConfig) -> int:
    """Return the number of the decoder's weights, without norms and biases."""
    vocabulary = config.vocab_size * config.hidden_size
    num_vocabularies = 2 if config.has_head and not config.tie_word_embeddings else 1
    return sum(layer_weights(config)) + num_vocabularies * vocabulary


def load_weights(
    path: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    source: TensorSource | None = None,
    product: MakeLinear = Projection,
    head_product: MakeLinear | None = None,
    experts: MakeExperts | None = None,
    quantized: MakeQuantized | None = None,
    quantize: Quantize | None = None,
    quantize_head: Quantize | None = None,
    stacks: MakeStack | None = None,
    shard: Shard = WHOLE_MODEL,
    collectives: Collectives | None = None,
) -> DecoderWeights:
    """Read all weights of ``config``, with q, k, v and gate, up fused.

    Ignored tensors of the checkpoint are logged.

    Args:
        path: The checkpoint's folder.
        config: Config of the whole model.
        dtype: Dtype of wide weights.
        device: Device of all weights.
        source: Tensors to read in place of ``path``'s; all of them are wide.
        product: Maker of linear maps with wide weights.
        head_product: Maker of a wide head; None for ``product``.
        experts: Maker of mixtures; None to compute one expert after another by ``product``.
        quantized: Maker of linear maps with quantized weights; None to widen them to ``dtype``.
        quantize: Quantizer of wide weights of attention, MLPs and experts. Experts of mixtures stay
            wide without ``stacks``.
        quantize_head: Quantizer of the head's wide weight.
        stacks: Maker of stacks of quantized experts, for ``experts``.
        shard: Share to keep, as copies. Of a stage only its layers are read, and the other weights
            as ``DecoderWeights`` says.
        collectives: Sums products of which a rank has a part of the inputs.

    Raises:
        CheckpointError: A tensor is missing, has another shape than ``config`` (both shapes are
            given), or is in the checkpoint but not in this decoder. The message has its name.
        ConfigError: Quantization was requested for weights that are quantized already.
    """
    assert collectives is not None or not shard.is_sliced, "parts of products have to be summed"
    if config.quantization is not None and (quantize or quantize_head):
        raise ConfigError(
            f"{path} is quantized already, by {config.quantization.method}. Remove --quantization, "
            "or name the original wide checkpoint."
        )
    makers = Makers(
        product,
        quantized or partial(DequantizedLinear, dtype=dtype),
        quantize,
        experts,
        stacks,
        collectives if shard.is_sliced else None,
    )
    index: TensorSource
    if source is None:
        index = _open(path, config)
        if isinstance(index, GgufTensors) and config.quantization and quantized is None:
            _log.warning("%s: its weights are widened to %s: there are no kernels", path, dtype)
        for sentence in ignored_parts(path):
            _log.warning(sentence)
    else:
        index = source
    prefix = _prefix(index)
    quantization = config.quantization if source is None else None
    reader = WeightReader(index, dtype, device, makers, quantization, shard)
    embedding = torch.empty(0, config.hidden_size, dtype=dtype, device=device)
    if shard.is_first:
        embedding = _embedding(reader, config, prefix)
    layers: list[LayerWeights] = []
    for number in stage_layers(config, shard):
        layers.append(load_layer(reader, config, f"{prefix}layers.{number}.", number=number))
        # Freed memory of a layer's tensors would stay with the process, up to half of the layer's
        # size.
        release_free_memory()
    final_norm = torch.empty(0, dtype=dtype, device=device)
    head = classifier = None
    if shard.is_last:
        final_norm = reader.tensor(prefix + _FINAL_NORM, (config.hidden_size,))
        if config.has_head:
            weight = _head_weight(reader, config, prefix, embedding)
            of_head = makers._replace(product=head_product or product)
            head = linear_of(weight, None, of_head, quantize_head)
        else:
            reader.skip_weight(_HEAD)
    # The last stage's output returns to the first stage, which pools it.
    if config.classifier is not None and (shard.is_first or shard.is_last):
        shape = (len(config.classifier.labels), config.hidden_size)
        classifier = reader.tensor(_CLASSIFIER, shape).float()
    _skip_other_stages(reader, config, prefix)
    reader.refuse_leftovers()
    release_free_memory()
    return DecoderWeights(embedding, tuple(layers), final_norm, head, classifier)


def load_embedding(
    path: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    source: TensorSource | None = None,
) -> torch.Tensor:
    """Load the whole embedding, [vocab_size, hidden_size], from ``source`` or from ``path``.

    Raises CheckpointError.
    """
    index: TensorSource = _open(path, config) if source is None else source
    makers = Makers(Projection, partial(DequantizedLinear, dtype=dtype), None, None)
    quantization = config.quantization if source is None else None
    reader = WeightReader(index, dtype, device, makers, quantization, WHOLE_MODEL)
    return _embedding(reader, config, _prefix(index))


def _open(path: Path, config: ModelConfig) -> TensorSource:
    parts = gguf_parts(path)
    return GgufTensors(parts, config) if parts else open_tensors(path)


def _prefix(index: TensorSource) -> str:
    """Return the prefix of tensor names, which checkpoints of embedding models omit."""
    return _PREFIX if any(name.startswith(_PREFIX) for name in index) else ""


def _embedding(reader: WeightReader, config: ModelConfig, prefix: str) -> torch.Tensor:
    return reader.widened(
        prefix + _EMBEDDING,
        config.vocab_size,
        config.hidden_size,
        vocabulary_slice(config.vocab_size, reader.shard),
        is_looked_up=True,
    )


def _skip_other_stages(reader: WeightReader, config: ModelConfig, prefix: str) -> None:
    """Skip the tensors that other stages read; each stage checks its own."""
    shard = reader.shard
    own = stage_layers(config, shard)
    others = [number for number in range(config.num_hidden_layers) if number not in own]
    reader.skip_below(tuple(f"{prefix}layers.{number}." for number in others))
    if not shard.is_first:
        reader.skip_weight(prefix + _EMBEDDING)
    if not shard.is_last:
        reader.skip(prefix + _FINAL_NORM)
        reader.skip_weight(_HEAD)
        if config.classifier is not None and not shard.is_first:
            reader.skip(_CLASSIFIER)


def _head_weight(
    reader: WeightReader, config: ModelConfig, prefix: str, embedding: torch.Tensor
) -> torch.Tensor | QuantizedWeight:
    """Return the head's weight, or the embedding if they are tied.

    A last stage that is not the first reads the embedding for this, and so does a head that is
    computed as the embedding is stored in a GGUF file. If the file holds a different head, it is
    used in spite of the config, as in transformers.
    """
    if config.tie_word_embeddings and reader.keeps_quantized:
        tokens = vocabulary_slice(config.vocab_size, reader.shard)
        return reader.weight(prefix + _EMBEDDING, config.vocab_size, config.hidden_size, tokens)
    if config.tie_word_embeddings and not reader.shard.is_first:
        embedding = _embedding(reader, config, prefix)
    if config.tie_word_embeddings and not reader.has_weight(_HEAD):
        return embedding
    own_tokens = vocabulary_slice(config.vocab_size, reader.shard)
    head = reader.weight(_HEAD, config.vocab_size, config.hidden_size, own_tokens)
    if not config.tie_word_embeddings:
        return head
    if isinstance(head, torch.Tensor) and torch.equal(head, embedding):
        return embedding
    _log.warning(
        "%s: config.json's tie_word_embeddings is ignored, because the checkpoint has a tensor "
        "%s that differs from the embedding",
        reader.path,
        _HEAD,
    )
    return head
