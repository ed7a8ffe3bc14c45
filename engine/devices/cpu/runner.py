"""Runner that computes a plan's flat batch on a CPU."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from pathlib import Path

import torch

from millrace.engine.adapters.rows import AdapterWeights, RowAdapters
from millrace.engine.config import ResolvedEngineConfig
from millrace.engine.devices.cpu.fused_decoder import FusedDecoder
from millrace.engine.devices.cpu.loading import (
    AnyDecoder,
    Arithmetic,
    load_adapter_weights,
    load_decoder,
)
from millrace.engine.kernels.operations import WeightSize
from millrace.engine.kv.cache import KVCache, cache_dtype, choose_num_blocks
from millrace.engine.sampling.prompt_logprobs import score_rows
from millrace.engine.sampling.sampler import Likeliest
from millrace.engine.scheduling.schedule import ScheduledSequence
from millrace.engine.step.batch import FlatBatch, build_batch
from millrace.engine.step.features import give_features
from millrace.engine.step.pooling import PooledChunk, pool_rows
from millrace.engine.step.runner import InFlightStep, Runner, nothing_chosen
from millrace.engine.types import RunnerFigures
from millrace.registry.checkpoints.checkpoint import ModelConfig, read_model_config
from millrace.schemas.errors import ConfigError
from millrace.schemas.models.adapters import AdapterRef


class ModelRunner(Runner):
    """Runner for a CPU. A launch computes the whole step, and the host chooses all tokens."""

    overlaps = False

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
    def load(cls, path: Path, engine: ResolvedEngineConfig) -> ModelRunner:
        """Load a checkpoint. Raises CheckpointError or ConfigError."""
        config = read_model_config(path)
        check_engine(engine)
        arithmetic = Arithmetic.chosen(config, engine)
        stored = cache_dtype(engine.kv_cache_dtype, arithmetic.dtype)
        cache = KVCache(
            config,
            num_blocks=choose_num_blocks(config, engine, stored),
            block_size_tokens=engine.block_size_tokens,
            dtype=stored,
            device=torch.device(engine.device),
            shared=engine.transfer,
        )
        decoder, is_row_exact = load_decoder(path, config, engine, arithmetic, cache)
        kernels = arithmetic.kernels
        likeliest = None if kernels is None else kernels.likeliest
        return cls(config, decoder, cache, likeliest, is_row_exact=is_row_exact)

    def figures(self) -> RunnerFigures:
        return RunnerFigures(expert_choices=self._decoder.expert_choices())

    @property
    def weight_size(self) -> WeightSize:
        return self._decoder.weight_size

    @property
    def host_device(self) -> torch.device:
        return self._device

    @property
    def embedding(self) -> torch.Tensor:
        """Return the embedding, [vocab_size, hidden_size]."""
        return self._decoder.embedding

    def keep_features(self, layers: tuple[int, ...]) -> None:
        """Give the sequences of every step the inputs of these layers as features.

        Only for a runner whose rows are exact. See ``FusedDecoder.forward_with_features``.
        """
        self._feature_layers = layers

    def load_adapter(
        self,
        adapter: AdapterRef,
        slot: int,  # noqa: ARG002 (adapters are wherever there is memory)
        *,
        max_rank: int,
    ) -> AdapterWeights:
        """Read an adapter of at most ``max_rank``. Raises AdapterError, ModelSourceError."""
        return load_adapter_weights(self._decoder, self.config, adapter, max_rank)

    def launch(self, plan: Rows[ScheduledSequence]) -> InFlightStep:
        """Compute a plan's tokens, and logits of the sequences that are now complete."""
        with torch.inference_mode():
            batch = build_batch(plan, self._device, exact=self.is_row_exact)
            hidden = self._forward(batch, batch.adapters)
            pooled: list[PooledChunk] = []
            if batch.pooled:
                normed = self._decoder.normed(hidden)
                pooled = pool_rows(batch.pooled, normed, self._decoder.labels)
            scored = score_rows(batch.scored, hidden, self._logits)
            if batch.sampled:
                logits = self._logits(hidden.index_select(0, batch.sampled_rows))
            else:
                logits = torch.empty(0, self.config.vocab_size)
            return InFlightStep([], batch.sampled, logits, pooled, scored, nothing_chosen)

    def _forward(self, batch: FlatBatch, adapters: RowAdapters | None) -> torch.Tensor:
        """Compute the hidden states of a batch: float32 [num_tokens, hidden_size]."""
        if not self._feature_layers or not isinstance(self._decoder, FusedDecoder):
            return self._decoder.forward(batch, adapters)
        layers = self._feature_layers
        hidden, features = self._decoder.forward_with_features(batch, adapters, layers)
        give_features(batch, features)
        return hidden

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the logits, float32 [num_rows, vocab_size], of rows of hidden states."""
        return self._decoder.logits(hidden)


def check_engine(engine: ResolvedEngineConfig) -> None:
    """Raise ConfigError for settings that only the kernels of a GPU support."""
    if engine.kv_cache_dtype == "fp8" or engine.deterministic:
        raise ConfigError(
            "A KV cache in fp8 and engine.deterministic need the kernels of a GPU. Set "
            "engine.kernels to 'triton', or to 'reference' to try them on a CPU. An 8-bit KV "
            "cache on a CPU is int8."
        )
