"""Runs the model on a plan's flat batch."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Rows
from functools import partial
from pathlib import Path

import torch

from millrace.registry.adapters import adapter_folder
from millrace.registry.checkpoints.adapters.outline import read_adapter_outline
from millrace.registry.checkpoints.checkpoint import ModelConfig, read_model_config
from millrace.schemas.config import EngineConfig
from millrace.schemas.errors import ConfigError
from millrace.schemas.models.adapters import AdapterRef
from millrace.workers.adapters.rows import AdapterWeights
from millrace.workers.adapters.weights import read_adapter_weights
from millrace.workers.engine.batch import FlatBatch, build_batch
from millrace.workers.engine.eager.attention import TorchAttention
from millrace.workers.engine.eager.cpu_operations import CpuMetadata, suits
from millrace.workers.engine.eager.fused_decoder import FusedDecoder, compiled_decoder
from millrace.workers.engine.eager.products import choose_product
from millrace.workers.engine.eager.torch_operations import TorchMetadata, TorchOperations
from millrace.workers.engine.features import give_features
from millrace.workers.engine.in_flight_step import ChosenTokens, InFlightStep
from millrace.workers.engine.kv.cache import KVCache, cache_dtype, choose_num_blocks
from millrace.workers.engine.pooling import PooledChunk, pool_rows
from millrace.workers.engine.sampling.prompt_logprobs import score_rows
from millrace.workers.engine.sampling.sampler import Likeliest
from millrace.workers.engine.scheduling.schedule import ScheduledSequence
from millrace.workers.engine.settings import choose_device, with_device_defaults
from millrace.workers.kernels.build import KernelBuildError, cpu_library
from millrace.workers.kernels.cpu import CpuKernels
from millrace.workers.kernels.operations import WeightSize
from millrace.workers.models.decoder import Decoder, DecoderWeights
from millrace.workers.models.dummy import DummyTensors
from millrace.workers.models.loader import choose_dtype, is_widened, load_weights
from millrace.workers.models.packed_projection import PackedProjection, packed_quantized
from millrace.workers.models.projection import Projection
from millrace.workers.models.weight_reader import MakeLinear
from millrace.workers.quantization.at_load import quantize_at_load
from millrace.workers.quantization.linear import MakeQuantized

_log = logging.getLogger(__name__)


AnyDecoder = Decoder[FlatBatch, TorchMetadata] | Decoder[FlatBatch, CpuMetadata]


class ModelRunner:
    """Owns the weights and the KV cache's memory. Which block belongs to whom is the planner's.

    ``overlaps``: whether what it launches is chosen on the device and read later, so that the next
    step may be launched before.
    """

    overlaps = False
    takes_adapters = True

    def __init__(
        self,
        config: ModelConfig,
        decoder: AnyDecoder,
        cache: KVCache,
        likeliest: Likeliest | None = None,
        *,
        is_row_exact: bool = False,
    ) -> None:
        self.config = config
        self.likeliest = likeliest
        self.is_row_exact = is_row_exact
        self.cache = cache
        self._decoder = decoder
        self._device = cache.data.device
        self._feature_layers: tuple[int, ...] = ()

    @classmethod
    def load(cls, path: Path, engine: EngineConfig) -> ModelRunner:
        """Load a checkpoint. Raises CheckpointError or ConfigError."""
        config = read_model_config(path)
        device = choose_device(engine.device)
        engine = with_device_defaults(engine, device)
        if engine.kv_cache_dtype == "fp8" or engine.deterministic:
            raise ConfigError(
                "A KV cache in fp8 and engine.deterministic are for the kernels of a GPU: set "
                "engine.kernels to 'triton', or to 'reference' for a try on a CPU; a KV cache of 8 "
                "bits is int8 here."
            )
        dtype, kernels, only_own = _arithmetic(config, engine, device)
        source = DummyTensors(dtype, device) if engine.load_format == "dummy" else None
        at_load = quantize_at_load(engine.quantization)
        product, quantized = _products(kernels, config, only_own=only_own)
        weights = load_weights(
            path,
            config,
            dtype=dtype,
            device=device,
            source=source,
            product=product,
            quantized=quantized,
            quantize=at_load.layers,
            quantize_head=at_load.head,
        )
        stored = cache_dtype(engine.kv_cache_dtype, dtype)
        cache = KVCache(
            config,
            num_blocks=choose_num_blocks(config, engine, engine.kv_cache_bytes, stored),
            block_size_tokens=engine.block_size_tokens,
            dtype=stored,
            device=device,
            shared=bool(engine.transfer),
        )
        attention = TorchAttention(
            cache,
            num_heads=config.num_attention_heads,
            dtype=dtype,
            windows=config.windows,
        )
        _log.info(
            "loaded %s in %s on %s by %s with %d KV blocks of %d tokens in %s",
            config.architecture,
            str(dtype).removeprefix("torch."),
            device,
            "torch alone" if kernels is None else "compiled kernels",
            cache.num_blocks,
            cache.block_size_tokens,
            str(stored).removeprefix("torch."),
        )
        decoder = _decoder(config, weights, attention, kernels)
        return cls(
            config,
            decoder,
            cache,
            None if kernels is None else kernels.likeliest,
            is_row_exact=isinstance(decoder, FusedDecoder)
            and isinstance(weights.head, PackedProjection),
        )

    @property
    def weight_size(self) -> WeightSize:
        """Of what a step multiplies with."""
        return self._decoder.weight_size

    @property
    def host_device(self) -> torch.device:
        return self._device

    @property
    def embedding(self) -> torch.Tensor:
        """[vocab_size, hidden_size]."""
        return self._decoder.embedding

    def keep_features(self, layers: tuple[int, ...]) -> None:
        """Hand the sequences of every step the hidden states that come into these layers, see
        ``FusedDecoder.forward_with_features``; of a runner whose rows are exact."""
        self._feature_layers = layers

    def load_adapter(
        self,
        adapter: AdapterRef,
        slot: int,  # noqa: ARG002 (adapters are wherever there is memory)
        *,
        max_rank: int,
    ) -> AdapterWeights:
        """Read an adapter of at most such a rank. Raises AdapterError, ModelSourceError."""
        folder = adapter_folder(adapter.source, adapter.name, adapter.version)
        outline = read_adapter_outline(folder, self.config, max_rank)
        with torch.inference_mode():
            layers = read_adapter_weights(outline, self.config, self._decoder.dtype)
            return self._decoder.adapter(layers)

    def launch(self, plan: Rows[ScheduledSequence]) -> InFlightStep:
        """Compute a plan's tokens; logits come only for sequences that are now complete.

        Launching a plan again gives the same: it only writes the cache where it wrote before.
        """
        with torch.inference_mode():
            batch = build_batch(plan, self._device, exact=self.is_row_exact)
            hidden = self._forward(batch)
            pooled: list[PooledChunk] = []
            if batch.pooled:
                normed = self._decoder.normed(hidden)
                pooled = pool_rows(batch.pooled, normed, self._decoder.labels)
            scored = score_rows(batch.scored, hidden, self._decoder.logits)
            if batch.sampled:
                logits = self._decoder.logits(hidden.index_select(0, batch.sampled_rows))
            else:
                logits = hidden.new_empty(0, self.config.vocab_size)
            return InFlightStep([], batch.sampled, logits, pooled, scored, _nothing_chosen)

    def _forward(self, batch: FlatBatch) -> torch.Tensor:
        if not self._feature_layers or not isinstance(self._decoder, FusedDecoder):
            return self._decoder.forward(batch, batch.adapters)
        layers = self._feature_layers
        hidden, features = self._decoder.forward_with_features(batch, batch.adapters, layers)
        give_features(batch, features)
        return hidden


def _decoder(
    config: ModelConfig,
    weights: DecoderWeights,
    attention: TorchAttention,
    kernels: CpuKernels | None,
) -> AnyDecoder:
    """The fastest that computes these weights."""
    if kernels is None:
        return Decoder(config, weights, TorchOperations(attention, epsilon=config.rms_norm_eps))
    return compiled_decoder(config, weights, attention, kernels)


def _arithmetic(
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


def _products(
    kernels: CpuKernels | None, config: ModelConfig, *, only_own: bool
) -> tuple[MakeLinear, MakeQuantized | None]:
    """What makes the linear maps of wide and of quantized weights; by the compiled kernels where
    these have products, if ``only_own`` are wanted or they are faster, and what stays wide of
    quantized weights too, as a step whose layers are all theirs is one call."""
    if kernels is None or not kernels.has_products:
        return Projection, None
    quantized = partial(packed_quantized, kernels)
    if only_own or config.quantization is not None:
        return partial(PackedProjection.of_wide, kernels), quantized
    return choose_product(kernels, config), quantized


def _nothing_chosen() -> ChosenTokens:
    """What is read of a step whose tokens are all the host's to choose."""
    return ChosenTokens([], [], None)


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
