"""Starting a group of ranks with a device each."""

from __future__ import annotations

import logging
import os
import socket
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from millrace.engine.config import ResolvedEngineConfig
from millrace.engine.devices.cuda.loading import Plans
from millrace.engine.devices.cuda.steps import StepParts
from millrace.engine.kernels.rank_view import MAX_RANKS, RanksFailedError
from millrace.engine.kernels.stage_link import link_memory
from millrace.engine.models.shard import check_shard
from millrace.engine.parallel.device_group.cache_parts import DeviceParts
from millrace.engine.parallel.device_group.channel import link_shape
from millrace.engine.parallel.device_group.lead import Lead
from millrace.engine.parallel.device_group.making import load_steps, make_channel, meet
from millrace.engine.parallel.device_group.patience import Patience
from millrace.engine.parallel.device_group.pipeline import PipelineGroupRunner
from millrace.engine.parallel.device_group.remote import (
    met_by_all,
    place_for_others,
    remote_device_stage,
)
from millrace.engine.parallel.device_group.runner import DeviceGroupRunner
from millrace.engine.parallel.group.control_wire import FolderPlace, JoinDevices, Started
from millrace.engine.parallel.group.loading import check_ranks
from millrace.engine.parallel.group.making import num_local_ranks, num_ranks
from millrace.engine.parallel.group.members import Members
from millrace.engine.parallel.group.remote.lead import join_remote
from millrace.registry.checkpoints.checkpoint import ModelConfig, read_model_config
from millrace.schemas.errors import ConfigError

_MEMBER = "millrace.engine.parallel.device_group.member"

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
            members = Members(num_ranks(engine), fds, remote, module=_MEMBER)
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
    members.wait_joined(engine.start_timeout_s, Started)
    try:
        ranks = meet(join, listener)
        lead = Lead(members, ranks, make_channel(join, ranks), engine.rank_timeout_s)
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


def runner_of_rank_0(lead: Lead, plans: Plans) -> Callable[[StepParts], DeviceGroupRunner]:
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
    check_ranks(engine)
    check_shard(config, engine.tensor_parallel, engine.expert_parallel, engine.pipeline_parallel)
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
