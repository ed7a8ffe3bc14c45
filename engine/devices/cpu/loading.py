"""From a checkpoint to a decoder that computes at once, and what it is computed by."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from millrace.engine.adapters.rows import AdapterWeights
from millrace.engine.adapters.weights import read_adapter_weights
from millrace.engine.devices.cpu.attention import TorchAttention
from millrace.engine.devices.cpu.fused_decoder import FusedDecoder, compiled_decoder
from millrace.engine.devices.cpu.operations import (
    CpuMetadata,
    TorchMetadata,
    TorchOperations,
    suits,
)
from millrace.engine.devices.cpu.products import choose_product
from millrace.engine.kernels.build import KernelBuildError, cpu_library
from millrace.engine.kernels.cpu import CpuKernels
from millrace.engine.kernels.operations import Collectives
from millrace.engine.kv.cache import KVCache
from millrace.engine.models.decoder import Decoder, DecoderWeights
from millrace.engine.models.dummy import DummyTensors
from millrace.engine.models.loader import choose_dtype, is_widened, load_weights
from millrace.engine.models.packed_projection import PackedProjection, packed_quantized
from millrace.engine.models.projection import Projection
from millrace.engine.models.shard import shard_config
from millrace.engine.models.weight_reader import MakeLinear
from millrace.engine.quantization.at_load import quantize_at_load
from millrace.engine.quantization.linear import MakeQuantized
from millrace.engine.step.batch import FlatBatch
from millrace.registry.adapters import adapter_folder
from millrace.registry.checkpoints.adapters.outline import read_adapter_outline
from millrace.registry.checkpoints.checkpoint import ModelConfig
from millrace.registry.checkpoints.shard import WHOLE_MODEL, Shard
from millrace.schemas.config import EngineConfig
from millrace.schemas.errors import ConfigError
from millrace.schemas.models.adapters import AdapterRef

_log = logging.getLogger(__name__)

AnyDecoder = Decoder[FlatBatch, TorchMetadata] | Decoder[FlatBatch, CpuMetadata]


class Arithmetic(NamedTuple):
    """What a model is computed in, by which compiled kernels if any, and whether its products are
    theirs, too."""

    dtype: torch.dtype
    kernels: CpuKernels | None
    has_own_products: bool

    @classmethod
    def chosen(
        cls,
        config: ModelConfig,
        engine: EngineConfig,
        device: torch.device,
        share: ModelConfig | None = None,
    ) -> Arithmetic:
        """For a model, of which one rank computes a ``share`` if that is given; steps are measured
        where it is not clear what is faster. Raises ConfigError."""
        dtype, kernels, only_own = _types(config, engine, device)
        if kernels is None:
            return cls(dtype, kernels, has_own_products=False)
        # What stays wide of quantized weights goes by the kernels, too, as a step whose layers are
        # all theirs is one call.
        own = kernels.has_products and (only_own or config.quantization is not None)
        return cls(dtype, kernels, own or choose_product(kernels, share or config))

    @property
    def makers(self) -> tuple[MakeLinear, MakeQuantized | None]:
        """What makes the linear maps of wide and of quantized weights."""
        if self.kernels is None or not self.kernels.has_products:
            return Projection, None
        quantized = partial(packed_quantized, self.kernels)
        if self.has_own_products:
            return partial(PackedProjection.of_wide, self.kernels), quantized
        return Projection, quantized


class LoadedDecoder(NamedTuple):
    """``is_row_exact``: whether a row of logits has the same bits whatever rows are beside it; of a
    stage before the last, a row of hidden states."""

    decoder: AnyDecoder
    is_row_exact: bool


def load_decoder(
    path: Path,
    config: ModelConfig,
    engine: EngineConfig,
    arithmetic: Arithmetic,
    cache: KVCache,
    shard: Shard = WHOLE_MODEL,
    collectives: Collectives | None = None,
) -> LoadedDecoder:
    """A checkpoint of ``config``, or a rank's ``shard`` of it, over ``cache``, which is that rank's
    own. Raises CheckpointError or ConfigError."""
    dtype, kernels, _ = arithmetic
    device = cache.data.device
    product, quantized = arithmetic.makers
    at_load = quantize_at_load(engine.quantization)
    weights = load_weights(
        path,
        config,
        dtype=dtype,
        device=device,
        source=DummyTensors(dtype, device) if engine.load_format == "dummy" else None,
        product=product,
        quantized=quantized,
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
    """An adapter of at most such a rank for a whole model's ``config``, or a rank's ``shard`` of
    it. Raises AdapterError, ModelSourceError."""
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
    """The fastest that computes these weights."""
    if kernels is None:
        operations = TorchOperations(attention, epsilon=config.rms_norm_eps)
        return Decoder(config, weights, operations, collectives)
    return compiled_decoder(config, weights, attention, kernels, collectives)


def _types(
    config: ModelConfig, engine: EngineConfig, device: torch.device
) -> tuple[torch.dtype, CpuKernels | None, bool]:
    """What is computed in, by which compiled kernels, and whether no other products are tried:
    where weights are rounded or rows have to be exact, and where a small model need not be widened
    for them to be. Raises ConfigError."""
    speculates = engine.speculation not in (None, "off", False)
    packs = engine.quantization is not None or speculates
    is_auto = engine.dtype == "auto" and not packs
    if is_auto and _is_exact_in_bfloat16(config) and is_widened(config, device):
        kernels = _cpu_kernels(engine.kernels, config, torch.bfloat16, device)
        if kernels is not None:
            return torch.bfloat16, kernels, True
    dtype = choose_dtype(config, engine.dtype, device, packs=packs)
    kernels = _cpu_kernels(engine.kernels, config, dtype, device)
    return dtype, kernels, packs or engine.kernels == "native"


def _is_exact_in_bfloat16(config: ModelConfig) -> bool:
    """Whether a checkpoint of bfloat16 is one whose tokens do not change with the company by the
    kernels' own products, as they do not in float32."""
    is_wide = config.dtype == "bfloat16" and config.quantization is None
    return is_wide and config.has_head and config.experts is None


def _cpu_kernels(
    choice: str, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> CpuKernels | None:
    """The compiled kernels, if they are wanted and can be had.

    Raises ConfigError for "native" where there are none.
    """
    why = f"they do not compute {config.architecture} of this shape in {dtype} on {device}."
    if choice != "torch" and suits(config, dtype, device):
        try:
            return CpuKernels(cpu_library(), dtype)
        except (KernelBuildError, OSError) as error:
            why = str(error)
            _log.warning("the engine computes with torch alone, more slowly: %s", why)
    if choice == "native":
        raise ConfigError(f"engine.kernels is 'native', but there are no kernels: {why}")
    return None
