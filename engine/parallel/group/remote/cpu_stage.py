"""A stage of ranks on CPUs, which are linked to the stages before and behind it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch

from millrace.engine.kernels.ranks import RankShape, rank_memory
from millrace.engine.kernels.stage_link import link_memory
from millrace.engine.kv.cache import block_bytes, cache_dtype
from millrace.engine.models.shard import shard_config
from millrace.engine.parallel.group.control_wire import Join
from millrace.engine.parallel.group.making import make_link, shard_of
from millrace.engine.parallel.group.remote.relay import LinkEnds
from millrace.registry.checkpoints.checkpoint import read_model_config
from millrace.runtime.process import available_bytes
from millrace.schemas.errors import ConfigError

_MIB = 1 << 20


class CpuStage:
    """See ``StageKind``."""

    module = None

    def __init__(self, join: Join, path: Path) -> None:
        """``path``: of the checkpoint on this host."""
        self._join = join
        self._path = path
        self._number = join.rank // join.config.tensor_parallel

    def check(self, name: str) -> None:
        """Raise ConfigError if its part of the KV cache is more than there is."""
        join, engine = self._join, self._join.config
        dtype = cache_dtype(engine.kv_cache_dtype, getattr(torch, join.dtype))
        config = shard_config(read_model_config(self._path), shard_of(join.rank, engine))
        of_block = engine.tensor_parallel * block_bytes(config, engine.block_size_tokens, dtype)
        needed, free = (join.num_blocks + 1) * of_block, available_bytes()
        if needed > free:
            raise ConfigError(
                f"the KV cache of {name} takes {needed / _MIB:.0f} MiB for the {join.num_blocks} "
                f"blocks of the worker, and {free / _MIB:.0f} MiB of memory are free on this host. "
                "Lower worker.engine.kv_cache_bytes."
            )

    def make_memory(self) -> list[int]:
        """See ``StageKind``."""
        join, number = self._join, self._number
        size = join.config.tensor_parallel
        links = {at: link_memory(join.link_shapes[at]) for at in (number - 1, number)}
        ranks: dict[int, int] = {}
        if size > 1:
            shape = RankShape(size, join.message_bytes, join.buffer_bytes)
            ranks[number] = rank_memory(shape)
        stages = range(join.config.pipeline_parallel)
        self._join = msgspec.structs.replace(
            join,
            path=str(self._path),
            link_fds=[links.get(at, -1) for at in stages],
            memory_fds=[ranks.get(at, -1) for at in stages],
        )
        return [*links.values(), *ranks.values()]

    def link_ends(self) -> LinkEnds:
        """See ``StageKind``."""
        join, number = self._join, self._number
        return LinkEnds(
            make_link(join, number, index=0),
            num_writers=join.link_shapes[number].num_writers,
            targets=[make_link(join, number - 1, index=0)],
        )

    def join_of(self, index: int) -> Join:
        """See ``StageKind``."""
        return msgspec.structs.replace(self._join, rank=self._join.rank + index)
