"""What every rank makes for itself, by what rank 0 has chosen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from millrace.registry.checkpoints.checkpoint import read_model_config
from millrace.schemas.config import EngineConfig
from millrace.workers.engine.device.device import device_of
from millrace.workers.engine.device.loading import Plans, StepsT, load_plans, make_ready
from millrace.workers.engine.device.steps import StepParts
from millrace.workers.engine.device_group.channel import Channel, LinkChannel
from millrace.workers.engine.device_group.ranks import DeviceRanks
from millrace.workers.engine.group.control_wire import JoinDevices
from millrace.workers.engine.group.making import shard_of
from millrace.workers.engine.settings import choose_device
from millrace.workers.kernels.build import cpu_library
from millrace.workers.kernels.stage_link import StageLink


def device_of_rank(rank: int, engine: EngineConfig) -> torch.device:
    """The CUDA device of its number, counted from the one that the settings name if they name one;
    or the CPU."""
    device = choose_device(engine.device)
    if device.type != "cuda":
        return device
    return torch.device("cuda", (device.index or 0) + rank)


def meet(join: JoinDevices) -> DeviceRanks:
    """A rank's way to the others, which all of them make at the same time. Raises
    RanksFailedError."""
    engine = join.config
    device = device_of_rank(join.rank, engine)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return DeviceRanks(
        Path(join.folder),
        device,
        shard_of(join.rank, engine),
        fixed=engine.deterministic,
        timeout_s=engine.start_timeout_s,
    )


def make_channel(join: JoinDevices, ranks: DeviceRanks) -> Channel:
    """A rank's end of the way of messages."""
    if join.link_fd < 0:
        return ranks.hosts
    link = StageLink(
        cpu_library(),
        join.link_fd,
        join.link_shape,
        index=max(0, join.rank - 1),
        timeout_s=join.config.rank_timeout_s,
    )
    return LinkChannel(link)


def load_steps(
    join: JoinDevices, ranks: DeviceRanks, make: Callable[[Plans], Callable[[StepParts], StepsT]]
) -> StepsT:
    """A rank's share of a checkpoint, ready to compute steps by what ``make`` makes. All ranks load
    theirs at the same time. Raises CheckpointError, ConfigError, or RanksFailedError where another
    one could not."""
    path, engine = Path(join.path), join.config
    device = device_of(device_of_rank(join.rank, engine))
    shard = shard_of(join.rank, engine)
    collectives = ranks if shard.is_sliced else None
    plans = load_plans(path, read_model_config(path), engine, device, shard, collectives)

    def agree(num_blocks: int) -> int:
        [least] = ranks.hosts.least([num_blocks])
        return least

    # One that cannot load its weights is noticed here, not in the middle of a step.
    ranks.hosts.least([0])
    steps = make_ready(plans, make(plans), agree)
    ranks.wait_at_most(engine.rank_timeout_s)
    return steps
