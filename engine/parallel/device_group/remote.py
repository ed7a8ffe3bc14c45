"""Stages of other hosts whose ranks have a device each, as rank 0 has them join."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import msgspec

from millrace.engine.config import ResolvedEngineConfig
from millrace.engine.parallel.device_group.channel import link_shape
from millrace.engine.parallel.group.control_wire import JoinDevices, NetworkPlace
from millrace.engine.parallel.group.making import device_link, num_local_ranks
from millrace.engine.parallel.group.remote.lead import RemoteStage
from millrace.engine.parallel.group.remote.meeting import listen_beside
from millrace.engine.parallel.group.remote.member import RemoteMember
from millrace.engine.parallel.group.remote.relay import LinkEnds


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
