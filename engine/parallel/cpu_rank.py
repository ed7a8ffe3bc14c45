"""A rank on a CPU: what each makes for itself, and what one that is not rank 0 computes."""

from __future__ import annotations

import gc
import itertools
import logging
from pathlib import Path
from typing import NoReturn

import torch

from millrace.engine.adapters.rows import AdapterWeights
from millrace.engine.config import ResolvedEngineConfig
from millrace.engine.devices.cpu.loading import Arithmetic, load_adapter_weights, load_decoder
from millrace.engine.kernels.build import cpu_library
from millrace.engine.kernels.cpu import CpuKernels
from millrace.engine.kernels.ranks import RankShape, SharedRanks
from millrace.engine.kernels.stage_link import StageLink
from millrace.engine.kv.cache import KVCache, cache_dtype
from millrace.engine.kv.host_memory import CachePart
from millrace.engine.models.shard import Shard, block_part, shard_config
from millrace.engine.parallel.control import (
    BlocksChecked,
    ControlSocket,
    FolderPlace,
    Join,
    LoadAdapter,
)
from millrace.engine.parallel.layout import make_link, num_local_ranks, shard_of, vocabulary_widths
from millrace.engine.parallel.messages import (
    PartCommand,
    StageStep,
    WantedLogits,
    bytes_of,
    decode,
    encode_command,
    encode_stage,
)
from millrace.engine.parallel.ranks import GlooRanks, Ranks
from millrace.engine.parallel.rendezvous import Rendezvous
from millrace.engine.step.batch import FlatBatch
from millrace.engine.transfer.memory import SharedPages
from millrace.registry.checkpoints.checkpoint import ModelConfig, read_model_config


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


_log = logging.getLogger(__name__)


class CpuMember:
    """One rank. Raises MillraceError if it cannot be loaded."""

    def __init__(self, join: Join, control: ControlSocket) -> None:
        self._control = control
        path, engine = Path(join.path), join.config
        self._shard = shard_of(join.rank, engine)
        self._config = read_model_config(path)
        dtype: torch.dtype = getattr(torch, join.dtype)
        kernels = CpuKernels(cpu_library(), dtype) if join.has_kernels else None
        self._ranks = make_ranks(join, self._shard)
        cache = cache_of_rank(join, self._config, dtype)
        # Rank 0 itself does with blocks of its host what is to be done with them.
        self._part = CachePart(cache) if join.cache_fd < 0 else None
        arithmetic = Arithmetic(dtype, kernels, join.has_own_products)
        self._decoder, _ = load_decoder(
            path, self._config, engine, arithmetic, cache, self._shard, self._ranks
        )
        self._widths = vocabulary_widths(self._config, self._shard.size)
        self._adapters: dict[int, AdapterWeights] = {}
        self._links: list[StageLink] = []
        self._num_steps = 0
        if not self._shard.is_first:
            own, stage = self._shard.rank, self._shard.stage
            self._links = [
                make_link(join, stage - 1, index=own),
                make_link(join, stage, index=own),
            ]
        gc.collect()
        gc.freeze()

    @torch.inference_mode()
    def compute(self) -> NoReturn:
        """Compute what rank 0 posts, or the stage before sends, until the group fails with
        RanksFailedError."""
        if self._links:
            for number in itertools.count():
                self._follow(number, *self._links)
        ranks = self._ranks
        assert ranks is not None, "a rank of the first stage is one of several"
        while True:
            message = decode(ranks.receive(), self._adapters.__getitem__)
            if isinstance(message, WantedLogits):
                ranks.gather(self._decoder.logits(message.rows), self._widths)
            elif isinstance(message, FlatBatch):
                self._decoder.forward(message, message.adapters)
                ranks.check()

    def _follow(self, number: int, before: StageLink, behind: StageLink) -> None:
        """What the message of this number says, from the link before this stage to the one behind
        it. The last stage's results have numbers of their own."""
        before.wait_written(number, bound=False)
        message = decode(before.part(number), self._adapters.__getitem__)
        before.done(number)
        if isinstance(message, PartCommand):
            if not self._shard.is_last and self._shard.rank == 0:
                behind.write(number, *encode_command(message))
            self._obey(message)
            return
        assert isinstance(message, StageStep)
        self._compute_stage(self._num_steps if self._shard.is_last else number, message, behind)
        self._num_steps += 1

    def _obey(self, told: PartCommand) -> None:
        """Do what is to be done with the part of the KV cache that this rank has."""
        if self._part is None:
            return
        finite = self._part.obey(told.command)
        if finite is not None:
            self._control.send(BlocksChecked(told.number, finite))

    def _compute_stage(self, number: int, step: StageStep, behind: StageLink) -> None:
        """A step, whose result has this number in the link behind this stage."""
        decoder = self._decoder
        hidden = decoder.forward_hidden(step.batch, step.hidden, step.batch.adapters)
        if self._ranks is not None:
            self._ranks.check()
        if not self._shard.is_last:
            if self._shard.rank == 0:
                behind.write(number, *encode_stage(step._replace(hidden=hidden)))
            return
        made: list[torch.Tensor] = []
        if len(step.wanted):
            made.append(decoder.logits(hidden.index_select(0, step.wanted)))
        if step.wants_states and self._shard.rank == 0:
            made.append(decoder.normed(hidden))
        behind.write(number, *map(bytes_of, made))

    def abort(self, why: str) -> None:
        """End the group."""
        if self._ranks is not None:
            self._ranks.abort(why)
        for link in self._links:
            link.abort(why)

    def drop_adapter(self, number: int) -> None:
        """Forget an adapter that no step will have."""
        self._adapters.pop(number, None)

    def load_adapter(self, load: LoadAdapter) -> None:
        """Read the slices of an adapter. Raises AdapterError, ModelSourceError."""
        self._adapters[load.number] = load_adapter_weights(
            self._decoder, self._config, load.adapter, load.max_rank, self._shard
        )
