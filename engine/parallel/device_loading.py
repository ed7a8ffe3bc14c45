"""Starting a group of ranks with a device each, on this host and on others."""

from __future__ import annotations

import logging
import os
import socket
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
import torch

from millrace.engine.config import ResolvedEngineConfig
from millrace.engine.devices.cuda.loading import Plans
from millrace.engine.devices.cuda.steps import StepParts
from millrace.engine.kernels.rank_view import MAX_RANKS, RanksFailedError
from millrace.engine.kernels.stage_link import link_memory
from millrace.engine.parallel.control import FolderPlace, JoinDevices, NetworkPlace, RankStarted
from millrace.engine.parallel.device_lead import DeviceLead, DeviceParts, Patience, link_shape
from millrace.engine.parallel.device_rank import load_steps, make_channel, meet
from millrace.engine.parallel.device_runner import DeviceGroupRunner, PipelineGroupRunner
from millrace.engine.parallel.layout import (
    check_group,
    device_link,
    num_local_ranks,
)
from millrace.engine.parallel.members import Members
from millrace.engine.parallel.remote.lead import (
    RemoteMember,
    RemoteStage,
    join_remote,
    listen_beside,
)
from millrace.engine.parallel.remote.relay import LinkEnds
from millrace.registry.checkpoints.checkpoint import ModelConfig, read_model_config
from millrace.schemas.errors import ConfigError

_log = logging.getLogger(__name__)


def load_device_group(path: Path, engine: ResolvedEngineConfig) -> DeviceGroupRunner:
    """Start the other ranks and load a checkpoint with them. Raises CheckpointError or
    ConfigError."""
    device = torch.device(engine.device)
    _check(read_model_config(path), engine, device)
    num_local = num_local_ranks(engine)
    shape = link_shape(num_local - 1 + engine.remote_stages)
    # A host that joins is told what to compute by its relay, which reads the link.
    link_fd = link_memory(shape) if engine.collectives == "shared_memory" else -1
    fds = () if link_fd < 0 else (link_fd,)
    listener = place_for_others(engine)
    try:
        with tempfile.TemporaryDirectory(prefix="millrace-ranks-") as folder:

            def join(rank: int) -> JoinDevices:
                return JoinDevices(
                    path=str(path),
                    config=engine,
                    rank=rank,
                    device=str(_device_of_rank(rank, device)),
                    place=FolderPlace(folder),
                    link_fd=link_fd,
                    link_shape=shape,
                    link_reader=max(0, rank - 1),
                )

            remote = join_remote(path, engine, partial(remote_device_stage, join(0), listener))
            members = Members(engine.num_ranks, fds, remote)
            try:
                members.join(lambda rank: met_by_all(join(rank), listener, remote))
                return _load_lead(met_by_all(join(0), listener, remote), members, listener)
            except BaseException:
                members.close()
                raise
    finally:
        for fd in fds:
            os.close(fd)
        if listener is not None:
            listener.close()


def _device_of_rank(rank: int, first: torch.device) -> torch.device:
    """The CUDA device of its number, counted from ``first``, or the CPU."""
    return torch.device("cuda", (first.index or 0) + rank) if first.type == "cuda" else first


def _load_lead(
    join: JoinDevices, members: Members, listener: socket.socket | None
) -> DeviceGroupRunner:
    """Rank 0, once all are loaded."""
    engine = join.config
    # A rank that does not come to the meeting is waited for in vain; one that is there comes.
    members.wait_joined(engine.start_timeout_s, RankStarted)
    try:
        ranks = meet(join, listener)
        lead = DeviceLead(members, ranks, make_channel(join, ranks), engine.rank_timeout_s)
        with Patience(engine.start_timeout_s, ranks.abort).waiting():
            runner = load_steps(join, ranks, partial(runner_of_rank_0, lead))
    except RanksFailedError as error:
        why = (
            members.why_refused() or f"the ranks of a group failed while they were loaded: {error}"
        )
        raise ConfigError(why) from error
    members.wait_joined(engine.start_timeout_s)
    num_layers, _, layer_bytes = runner.cache.blocks.shape
    all_layers = runner.config.num_hidden_layers * engine.tensor_parallel
    runner.cache.others = DeviceParts(lead, (all_layers - num_layers) * layer_bytes)
    _log.info("%s", members)
    return runner


def runner_of_rank_0(lead: DeviceLead, plans: Plans) -> Callable[[StepParts], DeviceGroupRunner]:
    """What makes it."""
    is_row_exact, shard = plans.is_row_exact, plans.shard
    if shard.num_stages == 1:
        return partial(DeviceGroupRunner, lead=lead, is_row_exact=is_row_exact)
    return partial(PipelineGroupRunner, lead=lead, is_row_exact=is_row_exact, shard=shard)


def _check(config: ModelConfig, engine: ResolvedEngineConfig, device: torch.device) -> None:
    """Raise ConfigError for what a group of devices does not compute."""
    if not engine.has_device_kernels:
        raise ConfigError(
            f"engine.kernels is {engine.kernels!r}, but ranks with a GPU each compute by triton; "
            "leave it out."
        )
    check_group(config, engine)
    size = num_local_ranks(engine)
    if size + engine.remote_stages > MAX_RANKS:
        raise ConfigError(
            f"engine.tensor_parallel times the stages of this host is {size}; ranks with a GPU "
            f"each are {MAX_RANKS} at most on it, less one for each stage of other hosts."
        )
    if device.type != "cuda":
        return
    first, num_devices = device.index or 0, torch.cuda.device_count()
    if first + size > num_devices:
        raise ConfigError(
            f"engine.tensor_parallel times the stages of this host is {size}, and each rank has a "
            f"GPU of its own, from number {first} on; this machine has {num_devices}."
        )


def place_for_others(engine: ResolvedEngineConfig) -> socket.socket | None:
    """Where ranks find one another if some are on other hosts: a port of its own at the address at
    which these join. Raises ConfigError if nobody can listen there."""
    return listen_beside(engine) if engine.remote_stages else None


def met_by_all(
    join: JoinDevices, listener: socket.socket | None, remote: Sequence[RemoteMember]
) -> JoinDevices:
    """What a rank of this host is to load, with a place that those of others find, too."""
    if listener is None:
        return join
    host = remote[0].our_host
    port: int = listener.getsockname()[1]
    return msgspec.structs.replace(join, place=NetworkPlace(host, port, host))


def remote_device_stage(
    join: JoinDevices, listener: socket.socket | None, number: int
) -> RemoteStage:
    """A stage that hears what rank 0 says to all; it loads as ``join`` says, which is what rank 0
    does, and finds the others where its host is connected to."""
    assert listener is not None, "there are stages of other hosts"
    engine = join.config
    size = engine.tensor_parallel
    num_local = num_local_ranks(engine)
    port: int = listener.getsockname()[1]
    theirs = msgspec.structs.replace(
        join,
        rank=number * size,
        device=join.device.split(":")[0],
        place=NetworkPlace("", port, ""),
        link_fd=-1,
        link_shape=link_shape(size),
    )
    own = num_local - 1 + number - num_local // size
    source = device_link(join, index=own)
    return RemoteStage(theirs, LinkEnds(source, num_writers=1, targets=[]))
