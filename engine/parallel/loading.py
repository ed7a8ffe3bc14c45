"""Start of a group of ranks on this and other hosts, on CPUs or with a device each."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
import torch

from millrace.engine.config import ResolvedEngineConfig
from millrace.engine.devices.cpu.loading import Arithmetic, load_decoder
from millrace.engine.devices.cpu.runner import check_engine
from millrace.engine.devices.cuda.loading import Plans
from millrace.engine.devices.cuda.steps import StepParts
from millrace.engine.kernels.rank_view import MAX_RANKS, RanksFailedError
from millrace.engine.kernels.ranks import RankShape, rank_memory
from millrace.engine.kernels.stage_link import LinkShape, link_memory
from millrace.engine.kv.cache import block_bytes, cache_dtype, choose_num_blocks
from millrace.engine.parallel.control import (
    FolderPlace,
    Join,
    JoinDevices,
    NetworkPlace,
    Place,
    RankStarted,
)
from millrace.engine.parallel.cpu_runner import (
    GroupParts,
    GroupRunner,
    Pipeline,
    PipelineRunner,
    RemoteParts,
)
from millrace.engine.parallel.device_runner import DeviceGroupRunner, PipelineGroupRunner
from millrace.engine.parallel.layout import check_group, make_link, num_local_ranks, shard_of
from millrace.engine.parallel.lead import DeviceLead, DeviceParts, Lead, Patience, link_shape
from millrace.engine.parallel.members import Members
from millrace.engine.parallel.rank import (
    group_cache,
    load_steps,
    make_channel,
    make_ranks,
    meet,
    part_layers,
)
from millrace.engine.parallel.remote.lead import (
    RemoteMember,
    RemoteStage,
    join_remote,
    listen_beside,
)
from millrace.engine.parallel.remote.relay import LinkEnds
from millrace.engine.transfer.memory import SharedPages
from millrace.registry.checkpoints.checkpoint import ModelConfig, read_model_config
from millrace.registry.checkpoints.shard import Shard, shard_config
from millrace.schemas.errors import ConfigError

_log = logging.getLogger(__name__)


def load_group(path: Path, engine: ResolvedEngineConfig) -> GroupRunner | DeviceGroupRunner:
    """Start the other ranks and load a checkpoint with them.

    Raises CheckpointError or ConfigError.
    """
    kind = DeviceGroup if engine.has_device_ranks else CpuGroup
    with tempfile.TemporaryDirectory(prefix="millrace-ranks-") as folder:
        group = kind(path, read_model_config(path), engine, folder)
        try:
            remote = join_remote(path, engine, group.remote_stage)
            members = Members(engine.num_ranks, group.fds, remote)
            try:
                group.meet_beside(remote)
                members.join(group.join_of)
                runner = group.load(members)
            except BaseException:
                members.close()
                raise
        finally:
            group.close()
    _log.info("%s", members)
    return runner


# Rows that ranks can exchange at once, as a multiple of a step's rows: proposed tokens add to
# these. Memory that is never written is never allocated.
_ROWS_AHEAD = 4
_FLOAT_BYTES = 4


class CpuGroup:
    """Group of ranks on CPUs: the shared memory of this host's ranks, and their KV cache.

    ``close`` closes the files once all ranks have mapped them.
    """

    def __init__(
        self, path: Path, config: ModelConfig, engine: ResolvedEngineConfig, folder: str
    ) -> None:
        """Create the memory.

        Raises ConfigError for settings that a group of CPUs does not support.
        """
        check_group(config, engine)
        check_engine(engine)
        own = shard_config(config, shard_of(0, engine))
        share = shard_config(config, Shard(0, engine.tensor_parallel, engine.expert_parallel))
        arithmetic = Arithmetic.chosen(config, engine, share)
        stored = cache_dtype(engine.kv_cache_dtype, arithmetic.dtype)
        num_layers = sum(part_layers(config, engine, range(engine.num_ranks)))
        own_layers = sum(part_layers(config, engine, range(num_local_ranks(engine))))
        num_blocks = choose_num_blocks(own, engine, stored, num_layers)
        layer_bytes = block_bytes(own, engine.block_size_tokens, stored) // own.num_hidden_layers
        pages = SharedPages((num_blocks + 1) * own_layers * layer_bytes, written_by_others=True)
        shape = _rank_shape(config, engine)
        self._link_shapes = _link_shapes(config, engine, shape.message_bytes)
        # Links between ranks of this host. A relay reads the link before a remote stage.
        first_remote = engine.pipeline_parallel - engine.remote_stages
        shapes = [
            link._replace(num_readers=1) if stage + 1 >= first_remote else link
            for stage, link in enumerate(self._link_shapes)
        ]
        has_memory = engine.collectives == "shared_memory" and engine.tensor_parallel > 1
        rank_fds = [rank_memory(shape) for _ in range(first_remote if has_memory else 0)]
        link_fds = [link_memory(link) for link in shapes]
        self.fds = (pages.fd, *rank_fds, *link_fds)
        self._config = config
        self._engine = engine
        self._arithmetic = arithmetic
        self._pages = pages
        self._remote_block_bytes = (num_layers - own_layers) * layer_bytes
        self._join = Join(
            path=str(path),
            config=engine,
            rank=0,
            dtype=str(arithmetic.dtype).removeprefix("torch."),
            has_kernels=arithmetic.kernels is not None,
            has_own_products=arithmetic.has_own_products,
            num_blocks=num_blocks,
            cache_fd=pages.fd,
            cache_bytes=pages.size_bytes,
            memory_fds=rank_fds,
            message_bytes=shape.message_bytes,
            buffer_bytes=shape.buffer_bytes,
            gloo_folder=folder,
            link_fds=link_fds,
            link_shapes=shapes,
        )

    def meet_beside(self, remote: Sequence[RemoteMember]) -> None:
        """Do nothing: the relays of remote stages connect to ranks of other hosts."""

    def join_of(self, rank: int) -> Join:
        """Return the request to load a rank of this host."""
        return msgspec.structs.replace(self._join, rank=rank)

    def remote_stage(self, number: int) -> RemoteStage:
        """Describe a remote stage and the links that its relay uses here.

        The remote host writes to its copy of the link before the stage and reads from the one after
        it; the relay here does the reverse.
        """
        join, shapes = self._join, list(self._link_shapes)
        shapes[number] = shapes[number]._replace(num_readers=1)
        theirs = msgspec.structs.replace(
            join,
            rank=number * join.config.tensor_parallel,
            cache_fd=-1,
            cache_bytes=0,
            memory_fds=[],
            gloo_folder="",
            link_fds=[],
            link_shapes=shapes,
        )
        num_writers = join.link_shapes[number].num_writers
        links = LinkEnds(
            make_link(join, number - 1, index=0),
            num_writers=1,
            targets=[make_link(join, number, index=index) for index in range(num_writers)],
        )
        return RemoteStage(theirs, links)

    def load(self, members: Members) -> GroupRunner:
        """Load rank 0 and wait for the other ranks."""
        config, engine, join, arithmetic = self._config, self._engine, self._join, self._arithmetic
        shard = shard_of(0, engine)
        ends = [0, engine.pipeline_parallel - 1] if engine.pipeline_parallel > 1 else []
        links = [make_link(join, number, index=0) for number in ends]
        ranks = make_ranks(join, shard)
        cache = group_cache(config, engine, arithmetic.dtype, join.num_blocks, self._pages)
        decoder, is_row_exact = load_decoder(
            Path(join.path), config, engine, arithmetic, cache.part(0), shard, ranks
        )
        members.wait_joined(engine.start_timeout_s)
        self._pages.seal()
        lead = Lead(members, [end.abort for end in (ranks, *links) if end is not None])
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
        pipeline = Pipeline(lead, links[0], links[1], config, shard.size)
        if engine.remote_stages:
            cache.others = RemoteParts(
                pipeline, members, self._remote_block_bytes, engine.rank_timeout_s
            )
        return PipelineRunner(parts, pipeline, engine.pipeline_parallel)

    def close(self) -> None:
        for fd in self._join.memory_fds + self._join.link_fds:
            os.close(fd)


def _rank_shape(config: ModelConfig, engine: ResolvedEngineConfig) -> RankShape:
    """Return a shape with room for a step's rows and their block tables."""
    most_rows = _most_rows(config, engine)
    row_bytes = _FLOAT_BYTES * max(config.hidden_size, config.vocab_size // engine.tensor_parallel)
    table_bytes = 4 * engine.bounds(config.context_window_tokens).num_blocks
    message_bytes = most_rows * (row_bytes + table_bytes + 64)
    return RankShape(engine.tensor_parallel, message_bytes, most_rows * row_bytes)


def _link_shapes(
    config: ModelConfig, engine: ResolvedEngineConfig, message_bytes: int
) -> list[LinkShape]:
    """Return the shapes of the links after each stage; the last link returns the results."""
    size, num_stages = engine.tensor_parallel, engine.pipeline_parallel
    if num_stages == 1:
        return []
    row_bytes = _FLOAT_BYTES * (config.vocab_size // size + 16 + config.hidden_size)
    back = LinkShape(size, 1, num_stages, _most_rows(config, engine) * row_bytes)
    return [LinkShape(1, size, num_stages, message_bytes)] * (num_stages - 1) + [back]


def _most_rows(config: ModelConfig, engine: ResolvedEngineConfig) -> int:
    """Return how many rows may wait between ranks."""
    bounds = engine.bounds(config.context_window_tokens)
    return _ROWS_AHEAD * (bounds.num_tokens + bounds.num_sequences)


class DeviceGroup:
    """Group of ranks with a device each: the link of rank 0's messages and the meeting place."""

    def __init__(
        self, path: Path, config: ModelConfig, engine: ResolvedEngineConfig, folder: str
    ) -> None:
        """Prepare the group. Raises ConfigError for settings that it does not support."""
        self._first_device = torch.device(engine.device)
        _check_devices(config, engine, self._first_device)
        # With remote stages, all ranks meet at another port of the host of engine.stages_address.
        self._listener = listen_beside(engine) if engine.remote_stages else None
        self._path = str(path)
        self._engine = engine
        self._place: Place = FolderPlace(folder)
        self._link_shape = link_shape(num_local_ranks(engine) - 1 + engine.remote_stages)
        # The relay of a remote host reads the link and passes the messages on.
        has_memory = engine.collectives == "shared_memory"
        self.fds = (link_memory(self._link_shape),) if has_memory else ()

    @property
    def _port(self) -> int:
        assert self._listener is not None, "only remote stages need a port"
        port: int = self._listener.getsockname()[1]
        return port

    def meet_beside(self, remote: Sequence[RemoteMember]) -> None:
        """Choose a meeting place that the ranks of other hosts can reach, too."""
        if remote:
            host = remote[0].our_host
            self._place = NetworkPlace(host, self._port, host)

    def join_of(self, rank: int) -> JoinDevices:
        """Return the request to load a rank of this host."""
        return JoinDevices(
            path=self._path,
            config=self._engine,
            rank=rank,
            device=str(_device_of_rank(rank, self._first_device)),
            place=self._place,
            link_fd=self.fds[0] if self.fds else -1,
            link_shape=self._link_shape,
            link_reader=max(0, rank - 1),
        )

    def remote_stage(self, number: int) -> RemoteStage:
        """Describe a remote stage, which gets rank 0's messages from the link.

        It meets the other ranks at the address that its host has connected to.
        """
        join, engine = self.join_of(0), self._engine
        size = engine.tensor_parallel
        num_local = num_local_ranks(engine)
        theirs = msgspec.structs.replace(
            join,
            rank=number * size,
            device=join.device.split(":")[0],
            place=NetworkPlace("", self._port, ""),
            link_fd=-1,
            link_shape=link_shape(size),
        )
        source = make_link(join, index=num_local - 1 + number - num_local // size)
        return RemoteStage(theirs, LinkEnds(source, num_writers=1, targets=[]))

    def load(self, members: Members) -> DeviceGroupRunner:
        """Load rank 0 once all ranks have started."""
        join, engine = self.join_of(0), self._engine
        # A missing rank would block the meeting until its timeout, so all must have started.
        members.wait_joined(engine.start_timeout_s, RankStarted)
        try:
            ranks = meet(join, self._listener)
            lead = DeviceLead(members, ranks, make_channel(join, ranks), engine.rank_timeout_s)
            with Patience(engine.start_timeout_s, ranks.abort).waiting():
                runner = load_steps(join, ranks, partial(runner_of_rank_0, lead))
        except RanksFailedError as error:
            failed = f"the ranks of a group failed while they were loaded: {error}"
            raise ConfigError(members.why_refused() or failed) from error
        members.wait_joined(engine.start_timeout_s)
        num_layers, _, layer_bytes = runner.cache.blocks.shape
        all_layers = runner.config.num_hidden_layers * engine.tensor_parallel
        runner.cache.others = DeviceParts(lead, (all_layers - num_layers) * layer_bytes)
        return runner

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
        if self._listener is not None:
            self._listener.close()


def _device_of_rank(rank: int, first: torch.device) -> torch.device:
    """Return the CUDA device of a rank, counted from ``first``, or the CPU."""
    return torch.device("cuda", (first.index or 0) + rank) if first.type == "cuda" else first


def runner_of_rank_0(lead: DeviceLead, plans: Plans) -> Callable[[StepParts], DeviceGroupRunner]:
    """Return the function that makes rank 0's runner."""
    is_row_exact, shard = plans.is_row_exact, plans.shard
    if shard.num_stages == 1:
        return partial(DeviceGroupRunner, lead=lead, is_row_exact=is_row_exact)
    return partial(PipelineGroupRunner, lead=lead, is_row_exact=is_row_exact, shard=shard)


def _check_devices(config: ModelConfig, engine: ResolvedEngineConfig, device: torch.device) -> None:
    """Raise ConfigError for settings that a group of devices does not support."""
    if not engine.has_device_kernels:
        raise ConfigError(
            f"engine.kernels is {engine.kernels!r}, but ranks with a GPU each need triton. Remove "
            "engine.kernels from the settings."
        )
    check_group(config, engine)
    size = num_local_ranks(engine)
    if size + engine.remote_stages > MAX_RANKS:
        raise ConfigError(
            f"engine.tensor_parallel times the stages of this host is {size}. A host has at most "
            f"{MAX_RANKS} ranks with a GPU each, less one for each stage of other hosts."
        )
    if device.type != "cuda":
        return
    first, num_devices = device.index or 0, torch.cuda.device_count()
    if first + size > num_devices:
        raise ConfigError(
            f"engine.tensor_parallel times the stages of this host is {size}, and each rank has a "
            f"GPU of its own, from number {first} on; this machine has {num_devices}."
        )
