"""Resolved settings of an engine: the user's settings with every open choice made.

``check_config`` raises an error for settings out of range; ``engine.step.settings`` makes the
choices. This module imports no torch, so that the worker's bus side can read what its engine
reports.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import msgspec

from millrace.registry.checkpoints.adapters.config import MAX_RANK
from millrace.schemas.config import EngineConfig
from millrace.schemas.config.section import Section
from millrace.schemas.config.worker import TransferTransport
from millrace.schemas.engines import check_quantization, check_speculation
from millrace.schemas.errors import ConfigError
from millrace.schemas.redaction import Secret

Dtype = Literal["bfloat16", "float16", "float32"]
Kernels = Literal["native", "torch", "triton", "reference"]
Collectives = Literal["shared_memory", "gloo"]

# Kernels of a device that runs launched steps and chooses tokens by itself.
DEVICE_KERNELS: tuple[Kernels, ...] = ("triton", "reference")


class KVBlocks(msgspec.Struct, frozen=True, tag="blocks"):
    """Size of a KV cache as a number of blocks."""

    num_blocks: int


class KVBytes(msgspec.Struct, frozen=True, tag="bytes"):
    """Size of a KV cache in bytes, those of all ranks together."""

    num_bytes: int


class KVMemoryShare(msgspec.Struct, frozen=True, tag="memory_share"):
    """Size of a KV cache as part of a GPU's memory.

    The cache gets ``fraction`` of the memory, less what weights and work buffers use, which is
    measured when the weights are loaded.
    """

    fraction: float


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    """Sources of proposed tokens, beside n-grams that occurred before.

    ``draft`` is the folder of a draft checkpoint and ``eagle3`` the folder of an EAGLE-3 head; at
    most one is set. ``is_asked`` is True if the user asked for speculation. Then a model whose rows
    are not exact (batch-invariant) raises an error; otherwise no tokens are proposed for such a
    model.
    """

    draft: str | None
    eagle3: str | None
    is_asked: bool


class StepBounds(NamedTuple):
    """Maximum sequences and tokens of a step, and maximum KV blocks of one sequence."""

    num_sequences: int
    num_tokens: int
    num_blocks: int


class ResolvedEngineConfig(Section, frozen=True, kw_only=True):
    """Resolved settings of an engine. ``EngineConfig`` documents the settings of the same name.

    None means that a feature is off, unless the field says otherwise.
    """

    device: str
    """``cpu``, ``cuda`` or ``cuda:N``. Rank 0 of a group has it; the other ranks have the next
    ones."""

    kernels: Kernels
    dtype: Dtype
    """Type that the model is computed in."""

    only_own_products: bool
    """True if ``native`` kernels compute all products, even where others are faster."""

    deterministic: bool
    quantization: str | None
    has_random_weights: bool

    max_num_sequences: int
    max_batch_tokens: int
    block_size_tokens: int
    kv_cache_size: KVBlocks | KVBytes | KVMemoryShare
    kv_cache_dtype: str | None
    """``fp8`` or ``int8``. None: keys and values are cached in ``dtype``."""

    num_threads: int | None
    """CPU threads of each rank. None: each host uses as many as its own cores allow."""

    cuda_graphs: bool
    overlap: bool
    start_timeout_s: float

    tensor_parallel: int
    pipeline_parallel: int
    expert_parallel: bool
    remote_stages: int
    stages_address: str
    stages_token: Secret
    collectives: Collectives | None
    """None for a single rank, which exchanges nothing."""

    rank_timeout_s: float

    speculation: Speculation | None
    max_adapters: int
    max_adapter_rank: int
    grammar_helpers: int
    ageing_s: float | None
    itl_bound_s: float | None

    prefix_cache: bool
    host_cache_bytes: int
    idle_offload_s: float
    disk_cache_path: str | None
    disk_cache_bytes: int
    object_cache_url: str | None
    object_cache_min_tokens: int
    object_cache_requests: int
    object_cache_timeout_s: float
    transfer: bool
    transfer_any_ranks: bool
    transfer_address: str | None
    transfer_transport: TransferTransport

    def bounds(self, context_window_tokens: int) -> StepBounds:
        """Return the maximum size of a step for a model with such a context window."""
        num_blocks = -(-context_window_tokens // self.block_size_tokens)
        return StepBounds(self.max_num_sequences, self.max_batch_tokens, num_blocks)

    @property
    def num_ranks(self) -> int:
        """Number of ranks in all stages. Each has a device of its own."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def has_device_kernels(self) -> bool:
        """True if steps are launched on a device that chooses tokens by itself."""
        return self.kernels in DEVICE_KERNELS

    @property
    def has_device_ranks(self) -> bool:
        """True if each rank of a group has a device of its own that runs launched steps."""
        return self.num_ranks != 1 and (self.has_device_kernels or self.device != "cpu")

    @property
    def has_parted_blocks(self) -> bool:
        """True if each rank has a part of each block in memory of its own.

        Ranks on GPUs and on other hosts do. Ranks on one CPU map the same cache.
        """
        return self.num_ranks != 1 and (self.remote_stages > 0 or self.has_device_ranks)


def check_config(config: EngineConfig) -> None:
    """Raise ConfigError for a setting out of range; the message names it."""
    for name in ("max_num_sequences", "max_batch_tokens", "kv_cache_bytes"):
        value = getattr(config, name)
        if value < 0:
            raise ConfigError(
                f"engine.{name} must be 0 (sized for the device) or more, got {value}."
            )
    for name in ("block_size_tokens", "grammar_helpers"):
        value = getattr(config, name)
        if value < 1:
            raise ConfigError(f"engine.{name} must be at least 1, got {value}.")
    if not 0 < config.gpu_memory_fraction <= 1:
        raise ConfigError(
            f"engine.gpu_memory_fraction must be above 0 and at most 1, got "
            f"{config.gpu_memory_fraction}."
        )
    if config.max_adapters is not None and config.max_adapters < 0:
        raise ConfigError(f"engine.max_adapters must be 0 or more, got {config.max_adapters}.")
    if not 1 <= config.max_adapter_rank <= MAX_RANK:
        raise ConfigError(
            f"engine.max_adapter_rank must be from 1 to {MAX_RANK}, got {config.max_adapter_rank}."
        )
    for name, choices in (
        ("load_format", ("auto", "dummy")),
        ("kv_cache_dtype", ("auto", "fp8", "int8")),
        ("kernels", ("auto", "native", "torch", "triton", "reference")),
    ):
        if getattr(config, name) not in choices:
            raise ConfigError(
                f"engine.{name} is {getattr(config, name)!r}; choose {', '.join(choices)}."
            )
    check_quantization(config.quantization, config.kind)
    check_speculation(config.speculation, config.kind)
    for name in ("ageing_s", "itl_bound_ms", "host_cache_bytes", "idle_offload_s"):
        amount = getattr(config, name)
        if not 0 <= amount < math.inf:
            raise ConfigError(f"engine.{name} must be 0 or more, got {amount}.")
    for name in ("object_cache_min_tokens", "object_cache_requests"):
        if getattr(config, name) < 1:
            raise ConfigError(f"engine.{name} must be at least 1, got {getattr(config, name)}.")
    if not 0 < config.object_cache_timeout_s < math.inf:
        raise ConfigError(
            f"engine.object_cache_timeout_s must be above 0, got {config.object_cache_timeout_s}."
        )
    if config.num_blocks < 0:
        raise ConfigError(
            f"engine.num_blocks must be 0 (sized by kv_cache_bytes) or more, got "
            f"{config.num_blocks}."
        )
