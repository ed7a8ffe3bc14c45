"""What every rank makes for itself, by what rank 0 has chosen."""

from __future__ import annotations

import torch

from millrace.engine.config import ResolvedEngineConfig
from millrace.engine.kernels.build import cpu_library
from millrace.engine.kernels.ranks import RankShape, SharedRanks
from millrace.engine.kernels.stage_link import StageLink
from millrace.engine.kv.cache import KVCache, cache_dtype
from millrace.engine.models.shard import Shard, block_part, shard_config
from millrace.engine.parallel.group.control_wire import FolderPlace, Join, JoinDevices
from millrace.engine.parallel.group.gloo_ranks import GlooRanks
from millrace.engine.parallel.group.ranks import Ranks
from millrace.engine.parallel.group.rendezvous import Rendezvous
from millrace.engine.transfer.memory import SharedPages
from millrace.registry.checkpoints.checkpoint import ModelConfig


def shard_of(rank: int, engine: ResolvedEngineConfig) -> Shard:
    """What a rank computes; they are numbered through all stages."""
    stage, own = divmod(rank, engine.tensor_parallel)
    return Shard(
        own, engine.tensor_parallel, engine.expert_parallel, stage, engine.pipeline_parallel
    )


def num_ranks(engine: ResolvedEngineConfig) -> int:
    """Of all stages."""
    return engine.tensor_parallel * engine.pipeline_parallel


def make_ranks(join: Join, shard: Shard) -> Ranks | None:
    """A rank's way to the others of its stage, which all of them make at the same time; None if
    there are none. Raises RanksFailedError."""
    if shard.size == 1:
        return None
    timeout_s = join.config.rank_timeout_s
    if not join.memory_fds:
        place = Rendezvous.at(FolderPlace(join.gloo_folder), timeout_s)
        return GlooRanks(place, rank=shard.rank, size=shard.size, timeout_s=timeout_s)
    shape = RankShape(shard.size, join.message_bytes, join.buffer_bytes)
    fd = join.memory_fds[shard.stage]
    return SharedRanks(cpu_library(), fd, shape, rank=shard.rank, timeout_s=timeout_s)


def make_link(join: Join, number: int, *, index: int) -> StageLink:
    """An end of the link behind the stage of this number, for its writer or reader ``index``."""
    return StageLink(
        cpu_library(),
        join.link_fds[number],
        join.link_shapes[number],
        index=index,
        timeout_s=join.config.rank_timeout_s,
    )


def device_link(join: JoinDevices, *, index: int) -> StageLink:
    """An end of the link by which rank 0 says what devices are to compute, for its writer or reader
    ``index``."""
    return StageLink(
        cpu_library(),
        join.link_fd,
        join.link_shape,
        index=index,
        timeout_s=join.config.rank_timeout_s,
    )


def num_local_ranks(engine: ResolvedEngineConfig) -> int:
    """Of the stages that are on the host of rank 0."""
    return engine.tensor_parallel * (engine.pipeline_parallel - engine.remote_stages)


def part_layers(config: ModelConfig, engine: ResolvedEngineConfig, ranks: range) -> tuple[int, ...]:
    """How many layers each of the ranks has of a whole model's ``config``."""
    shards = [shard_of(rank, engine) for rank in ranks]
    return tuple(shard_config(config, shard).num_hidden_layers for shard in shards)


def group_cache(
    config: ModelConfig,
    engine: ResolvedEngineConfig,
    dtype: torch.dtype,
    num_blocks: int,
    pages: SharedPages,
) -> KVCache:
    """The KV cache of all ranks of this host, each of which has its layers and heads of a whole
    model's ``config`` in a part; ``dtype`` of the weights."""
    ranks = range(num_local_ranks(engine))
    layers = part_layers(config, engine, ranks)
    cache = _cache(config, engine, dtype, num_blocks, shard_of(0, engine), pages, layers)
    cache.parts = tuple(block_part(config, shard_of(rank, engine)) for rank in ranks)
    return cache


def cache_of_rank(join: Join, config: ModelConfig, dtype: torch.dtype) -> KVCache:
    """A rank's part of the KV cache: of what rank 0 has made, or memory of its own on another host.
    Raises ConfigError if there is none."""
    engine = join.config
    if join.cache_fd < 0:
        return _cache(config, engine, dtype, join.num_blocks, shard_of(join.rank, engine))
    pages = SharedPages.mapped(join.cache_fd, join.cache_bytes)
    return group_cache(config, engine, dtype, join.num_blocks, pages).part(join.rank)


def _cache(
    config: ModelConfig,
    engine: ResolvedEngineConfig,
    dtype: torch.dtype,
    num_blocks: int,
    shard: Shard,
    pages: SharedPages | None = None,
    layers: tuple[int, ...] | None = None,
) -> KVCache:
    return KVCache(
        shard_config(config, shard),
        num_blocks=num_blocks,
        block_size_tokens=engine.block_size_tokens,
        dtype=cache_dtype(engine.kv_cache_dtype, dtype),
        device=torch.device("cpu"),
        pages=pages,
        part_layers=layers,
    )
