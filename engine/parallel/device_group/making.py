"""What every rank makes for itself, by what rank 0 has chosen."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import torch

from millrace.engine.devices.cuda.device import device_of
from millrace.engine.devices.cuda.loading import Plans, StepsT, load_plans, make_ready
from millrace.engine.devices.cuda.steps import StepParts
from millrace.engine.parallel.device_group.channel import Channel, LinkChannel
from millrace.engine.parallel.device_group.ranks import DeviceRanks
from millrace.engine.parallel.group.control_wire import JoinDevices
from millrace.engine.parallel.group.making import device_link, shard_of
from millrace.engine.parallel.group.rendezvous import Rendezvous
from millrace.registry.checkpoints.checkpoint import read_model_config


def meet(join: JoinDevices, listener: socket.socket | None = None) -> DeviceRanks:
    """A rank's way to the others, which all of them make at the same time; ``listener`` is where
    rank 0 has a place on the network. Raises RanksFailedError."""
    engine = join.config
    device = torch.device(join.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout_s = engine.start_timeout_s
    return DeviceRanks(
        Rendezvous.at(join.place, timeout_s, listener),
        device,
        shard_of(join.rank, engine),
        fixed=engine.deterministic,
        timeout_s=timeout_s,
    )


def make_channel(join: JoinDevices, ranks: DeviceRanks) -> Channel:
    """A rank's end of the way of messages."""
    if join.link_fd < 0:
        return ranks.hosts
    return LinkChannel(device_link(join, index=join.link_reader))


def load_steps(
    join: JoinDevices, ranks: DeviceRanks, make: Callable[[Plans], Callable[[StepParts], StepsT]]
) -> StepsT:
    """A rank's share of a checkpoint, ready to compute steps by what ``make`` makes. All ranks load
    theirs at the same time. Raises CheckpointError, ConfigError, or RanksFailedError where another
    one could not."""
    path, engine = Path(join.path), join.config
    device = device_of(torch.device(join.device))
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
