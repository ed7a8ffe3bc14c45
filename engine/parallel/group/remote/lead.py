"""The ranks of other hosts, as rank 0 has them join."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from millrace.engine.config import ResolvedEngineConfig
from millrace.engine.kernels.stage_link import LinkShape
from millrace.engine.parallel.group.control_wire import Join, JoinDevices
from millrace.engine.parallel.group.making import make_link
from millrace.engine.parallel.group.members import end_members
from millrace.engine.parallel.group.remote.checkpoint import CheckpointIdentity
from millrace.engine.parallel.group.remote.connection import Connection
from millrace.engine.parallel.group.remote.meeting import Meeting
from millrace.engine.parallel.group.remote.member import RemoteMember
from millrace.engine.parallel.group.remote.relay import LinkEnds, RankEnd, Relay
from millrace.engine.parallel.group.remote.wire import Assignment


class RemoteStage(NamedTuple):
    """What the first rank of a stage of another host is to load, and the links here that its relay
    is an end of."""

    join: Join | JoinDevices
    links: LinkEnds


def join_remote(
    path: Path, engine: ResolvedEngineConfig, stage_of: Callable[[int], RemoteStage]
) -> list[RemoteMember]:
    """The ranks of the remote stages, none if there are none; ``stage_of``: by number.

    Raises CheckpointError, and ConfigError for a stage that does not come.
    """
    if not engine.remote_stages:
        return []
    identity = CheckpointIdentity.of(path)
    members: list[RemoteMember] = []
    try:
        with Meeting(engine) as meeting:
            first = engine.pipeline_parallel - engine.remote_stages
            for number in range(first, engine.pipeline_parallel):
                stage = stage_of(number)
                join = msgspec.structs.replace(stage.join, config=_without_secrets(engine))
                connection = meeting.take(number, Assignment(join, *identity))
                # At once, as each host is to hear from here while others are waited for.
                members += _members(number, engine, connection, stage.links)
    except BaseException:
        end_members(members)
        raise
    return members


def remote_cpu_stage(number: int, join: Join, shapes: list[LinkShape]) -> RemoteStage:
    """A stage that is linked to others: its host writes to the link before it and reads from the
    one behind it, for whoever does here, and its relay the reverse. It loads as ``join`` says,
    which is what rank 0 does; ``shapes`` are those of links between ranks of one host."""
    shapes = list(shapes)
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


def _without_secrets(engine: ResolvedEngineConfig) -> ResolvedEngineConfig:
    return msgspec.structs.replace(engine, stages_token="")


def _members(
    number: int, engine: ResolvedEngineConfig, connection: Connection, links: LinkEnds
) -> list[RemoteMember]:
    """The ranks of a stage."""
    size = engine.tensor_parallel
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(size)]
    relay = Relay(connection, links, [RankEnd(theirs, _closed_here) for _, theirs in pairs])
    members = [
        RemoteMember(number * size + index, ours, connection, relay)
        for index, (ours, _) in enumerate(pairs)
    ]
    relay.start()
    return members


def _closed_here() -> str:
    return "the group has ended"
