"""Loading of a checkpoint into a decoder for CPUs, and the choice of its kernels."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from millrace.engine.adapters.rows import AdapterWeights
from millrace.engine.adapters.weights import read_adapter_weights
from millrace.engine.config import ResolvedEngineConfig
from millrace.engine.devices.cpu.attention import TorchAttention
from millrace.engine.devices.cpu.fused_decoder import FusedDecoder, compiled_decoder
from millrace.engine.devices.cpu.operations import (
    CpuMetadata,
    TorchMetadata,
    TorchOperations,
)
from millrace.engine.devices.cpu.products import choose_product
from millrace.engine.kernels.build import cpu_library
from millrace.engine.kernels.cpu import CpuKernels
from millrace.engine.kernels.operations import Collectives
from millrace.engine.kv.cache import KVCache
from millrace.engine.models.decoder import Decoder, DecoderWeights
from millrace.engine.models.dummy import DummyTensors
from millrace.engine.models.linears import PackedProjection, Projection, packed_quantized
from millrace.engine.models.loader import load_weights
from millrace.engine.models.weight_reader import MakeLinear
from millrace.engine.quantization.linear import MakeQuantized
from millrace.engine.quantization.rounding import quantize_at_load
from millrace.engine.step.batch import FlatBatch
from millrace.registry.adapters import adapter_folder
from millrace.registry.checkpoints.adapters.outline import read_adapter_outline
from millrace.registry.checkpoints.checkpoint import ModelConfig
from millrace.registry.checkpoints.shard import WHOLE_MODEL, Shard, shard_config
from millrace.schemas.models.adapters import AdapterRef

_log = logging.getLogger(__name__)

AnyDecoder = Decoder[FlatBatch, TorchMetadata] | Decoder[FlatBatch, CpuMetadata]


class LinearMakers(NamedTuple):
    """Makers of linear maps: of wide weights of layers, of a wide head, and of quantized weights.

    Without ``quantized``, quantized weights are widened.
    """

    product: MakeLinear
    head: MakeLinear
    quantized: MakeQuantized | None


class Arithmetic(NamedTuple):
    """Arithmetic of a model: its dtype, its compiled kernels if any, and the maker of its products.

    ``has_own_products`` is True if the compiled kernels do the products, False if torch does.
    """

    dtype: torch.dtype
    kernels: CpuKernels | None
    has_own_products: bool

    @classmethod
    def chosen(
        cls,
        config: ModelConfig,
        engine: ResolvedEngineConfig,
        share: ModelConfig | None = None,
    ) -> Arithmetic:
        """Choose the arithmetic of a model, or of a rank's ``share`` of it.

        Steps are measured where it is not known which products are faster.
        """
        dtype = getattr(torch, engine.dtype)
        if engine.kernels != "native":
            return cls(dtype, None, has_own_products=False)
        kernels = CpuKernels(cpu_library(), dtype)
        # Wide layers of quantized models go by the compiled kernels, too: if all layers do, a step
        # is one call.
        only_own = engine.only_own_products or config.quantization is not None
        own = kernels.has_products and only_own
        return cls(dtype, kernels, own or choose_product(kernels, share or config))

    @property
    def makers(self) -> LinearMakers:
        """Return the makers of linear maps."""
        if self.kernels is None or not self.kernels.has_products:
            return LinearMakers(Projection, Projection, None)
        packed = partial(PackedProjection.of_wide, self.kernels)
        return LinearMakers(
            product=packed if self.has_own_products else Projection,
            # oneDNN has no float32 sums, which logits are.
            head=packed,
            quantized=partial(packed_quantized, self.kernels),
        )


class LoadedDecoder(NamedTuple):
    """Decoder with its weights.

    ``is_row_exact`` is True if a row of logits has the same bits for any other rows in the batch.
    For a pipeline stage before the last, it is about rows of hidden states.
    """

    decoder: AnyDecoder
    is_row_exact: bool


def load_decoder(
    path: Path,
    config: ModelConfig,
    engine: ResolvedEngineConfig,
    arithmetic: Arithmetic,
    cache: KVCache,
    shard: Shard = WHOLE_MODEL,
    collectives: Collectives | None = None,
) -> LoadedDecoder:
    """Load a checkpoint of ``config``, or a rank's ``shard`` of it, over that rank's ``cache``.

    Raises:
        CheckpointError: The checkpoint cannot be read.
        ConfigError: The settings do not suit the model.
    """
    dtype, kernels, _ = arithmetic
    device = cache.data.device
    makers = arithmetic.makers
    at_load = quantize_at_load(engine.quantization)
    weights = load_weights(
        path,
        config,
        dtype=dtype,
        device=device,
        source=DummyTensors(dtype, device) if engine.has_random_weights else None,
        product=makers.product,
        head_product=makers.head,
        quantized=makers.quantized,
        quantize=at_load.layers,
        quantize_head=at_load.head,
        shard=shard,
        collectives=collectives,
    )
    own = shard_config(config, shard)
    attention = TorchAttention(
        cache, num_heads=own.num_attention_heads, dtype=dtype, windows=own.windows
    )
    _log.info(
        "loaded %s in %s on %s by %s with %d KV blocks of %d tokens in %s",
        config.architecture,
        str(dtype).removeprefix("torch."),
        device,
        "torch alone" if kernels is None else "compiled kernels",
        cache.num_blocks,
        cache.block_size_tokens,
        str(cache.data.dtype).removeprefix("torch."),
    )
    decoder = _decoder(own, weights, attention, kernels, collectives)
    is_exact_behind = isinstance(weights.head, PackedProjection) or not shard.is_last
    return LoadedDecoder(decoder, isinstance(decoder, FusedDecoder) and is_exact_behind)


def load_adapter_weights(
    decoder: AnyDecoder,
    config: ModelConfig,
    adapter: AdapterRef,
    max_rank: int,
    shard: Shard = WHOLE_MODEL,
) -> AdapterWeights:
    """Load an adapter of at most ``max_rank`` for a whole model's ``config``, or a ``shard`` of it.

    Raises:
        AdapterError: The adapter cannot be read or does not suit the model.
        ModelSourceError: The adapter's source cannot be read.
    """
    folder = adapter_folder(adapter.source, adapter.name, adapter.version)
    outline = read_adapter_outline(folder, config, max_rank)
    with torch.inference_mode():
        return decoder.adapter(read_adapter_weights(outline, config, decoder.dtype, shard))


def _decoder(
    config: ModelConfig,
    weights: DecoderWeights,
    attention: TorchAttention,
    kernels: CpuKernels | None,
    collectives: Collectives | None,
) -> AnyDecoder:
    """Return the fastest decoder for these weights."""
    if kernels is None:
        operations = TorchOperations(attention, epsilon=config.rms_norm_eps)
        return Decoder(config, weights, operations, collectives)
    return compiled_decoder(config, weights, attention, kernels, collectives)
