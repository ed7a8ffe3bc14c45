"""Starting a group of ranks on CPUs."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path
from typing import NamedTuple

from millrace.engine.config import ResolvedEngineConfig
from millrace.engine.devices.cpu.loading import Arithmetic, load_decoder
from millrace.engine.devices.cpu.runner import check_engine
from millrace.engine.kernels.ranks import RankShape, rank_memory
from millrace.engine.kernels.stage_link import LinkShape, link_memory
from millrace.engine.kv.cache import block_bytes, cache_dtype, choose_num_blocks
from millrace.engine.models.shard import Shard, shard_config
from millrace.engine.parallel.control import Join
from millrace.engine.parallel.cpu_rank import group_cache, make_ranks, part_layers
from millrace.engine.parallel.cpu_runner import (
    GroupParts,
    GroupRunner,
    Pipeline,
    PipelineRunner,
    RemoteParts,
)
from millrace.engine.parallel.layout import (
    check_group,
    make_link,
    num_local_ranks,
    shard_of,
)
from millrace.engine.parallel.lead import Lead
from millrace.engine.parallel.members import Members
from millrace.engine.parallel.remote.lead import join_remote, remote_cpu_stage
from millrace.engine.transfer.memory import SharedPages
from millrace.registry.checkpoints.checkpoint import ModelConfig, read_model_config

# Rows that ranks can exchange at once, for each of those that a step is planned to have: tokens
# that are proposed come on top. Memory that is not written to is not taken.
_ROWS_AHEAD = 4
_FLOAT_BYTES = 4

_log = logging.getLogger(__name__)


class _Memory(NamedTuple):
    """Files of the group, which rank 0 closes once everyone has mapped them: of each stage's ranks,
    none if they meet otherwise, and of the links behind each stage. ``link_shapes`` are those of
    links between ranks of one host; where a stage is on another one, its relay reads the link
    before it."""

    shape: RankShape
    rank_fds: list[int]
    link_shapes: list[LinkShape]
    own_link_shapes: list[LinkShape]
    link_fds: list[int]

    @property
    def fds(self) -> list[int]:
        return [*self.rank_fds, *self.link_fds]


def load_group(path: Path, engine: ResolvedEngineConfig) -> GroupRunner:
    """Start the other ranks and load a checkpoint with them. Raises CheckpointError or
    ConfigError."""
    config = read_model_config(path)
    check_group(config, engine)
    check_engine(engine)
    shard = shard_of(0, engine)
    own = shard_config(config, shard)
    share = shard_config(config, Shard(0, engine.tensor_parallel, engine.expert_parallel))
    arithmetic = Arithmetic.chosen(config, engine, share)
    stored = cache_dtype(engine.kv_cache_dtype, arithmetic.dtype)
    num_layers = sum(part_layers(config, engine, range(engine.num_ranks)))
    own_layers = sum(part_layers(config, engine, range(num_local_ranks(engine))))
    num_blocks = choose_num_blocks(own, engine, stored, num_layers)
    layer_bytes = block_bytes(own, engine.block_size_tokens, stored) // own.num_hidden_layers
    pages = SharedPages((num_blocks + 1) * own_layers * layer_bytes, written_by_others=True)
    memory = _make_memory(config, engine)
    try:
        with tempfile.TemporaryDirectory(prefix="millrace-ranks-") as folder:

            def join(rank: int) -> Join:
                return Join(
                    path=str(path),
                    config=engine,
                    rank=rank,
                    dtype=str(arithmetic.dtype).removeprefix("torch."),
                    has_kernels=arithmetic.kernels is not None,
                    has_own_products=arithmetic.has_own_products,
                    num_blocks=num_blocks,
                    cache_fd=pages.fd,
                    cache_bytes=pages.size_bytes,
                    memory_fds=memory.rank_fds,
                    message_bytes=memory.shape.message_bytes,
                    buffer_bytes=memory.shape.buffer_bytes,
                    gloo_folder=folder,
                    link_fds=memory.link_fds,
                    link_shapes=memory.own_link_shapes,
                )

            remote = join_remote(
                path, engine, lambda stage: remote_cpu_stage(stage, join(0), memory.link_shapes)
            )
            members = Members(engine.num_ranks, (pages.fd, *memory.fds), remote)
            try:
                members.join(join)
                links = [make_link(join(0), at, index=0) for at in _ends(engine)]
                ranks = make_ranks(join(0), shard)
                cache = group_cache(config, engine, arithmetic.dtype, num_blocks, pages)
                decoder, is_row_exact = load_decoder(
                    path, config, engine, arithmetic, cache.part(0), shard, ranks
                )
                members.wait_joined(engine.start_timeout_s)
            except BaseException:
                members.close()
                raise
    finally:
        for fd in memory.fds:
            os.close(fd)
    pages.seal()
    _log.info("%s", members)
    aborts = [end.abort for end in (ranks, *links) if end is not None]
    lead = Lead(members, aborts)
    parts = GroupParts(
        config=config,
        decoder=decoder,
        cache=cache,
        likeliest=None if arithmetic.kernels is None else arithmetic.kernels.likeliest,
        lead=lead,
        shard=shard,
        ranks=ranks,
        is_row_exact=is_row_exact and arithmetic.has_own_products,
    )
    if not links:
        return GroupRunner(parts)
    pipeline = Pipeline(lead, links[0], links[1], config, shard.size, decoder.dtype)
    if remote:
        remote_bytes = (num_layers - own_layers) * layer_bytes
        cache.others = RemoteParts(pipeline, members, remote_bytes, engine.rank_timeout_s)
    return PipelineRunner(parts, pipeline, engine.pipeline_parallel)


def _ends(engine: ResolvedEngineConfig) -> list[int]:
    """The links that rank 0 has an end of."""
    return [] if engine.pipeline_parallel == 1 else [0, engine.pipeline_parallel - 1]


def _make_memory(config: ModelConfig, engine: ResolvedEngineConfig) -> _Memory:
    """Room for the rows of a step, and for as much of the others' block tables. Raises ConfigError
    where there is none of the kind."""
    size, num_stages = engine.tensor_parallel, engine.pipeline_parallel
    bounds = engine.bounds(config.context_window_tokens)
    most_rows = _ROWS_AHEAD * (bounds.num_tokens + bounds.num_sequences)
    row_bytes = _FLOAT_BYTES * max(config.hidden_size, config.vocab_size // size)
    table_bytes = 4 * bounds.num_blocks
    shape = RankShape(size, most_rows * (row_bytes + table_bytes + 64), most_rows * row_bytes)
    rank_fds: list[int] = []
    if engine.collectives == "shared_memory":
        num_here = num_stages - engine.remote_stages
        rank_fds = [rank_memory(shape) for _ in range(num_here if size > 1 else 0)]
    if num_stages == 1:
        return _Memory(shape, rank_fds, [], [], [])
    between = LinkShape(1, size, num_stages, shape.message_bytes)
    result_bytes = most_rows * _FLOAT_BYTES * (config.vocab_size // size + 16 + config.hidden_size)
    back = LinkShape(size, 1, num_stages, result_bytes)
    shapes = [*[between] * (num_stages - 1), back]
    first_remote = num_stages - engine.remote_stages
    own_shapes = [
        link._replace(num_readers=1) if stage + 1 >= first_remote else link
        for stage, link in enumerate(shapes)
    ]
    return _Memory(shape, rank_fds, shapes, own_shapes, [link_memory(link) for link in own_shapes])
