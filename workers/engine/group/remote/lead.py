"""The ranks of other hosts, as rank 0 has them join."""

from __future__ import annotations

import socket
from pathlib import Path

import msgspec

from millrace.schemas.config import EngineConfig
from millrace.workers.engine.group.control_wire import Join
from millrace.workers.engine.group.making import make_link
from millrace.workers.engine.group.members import end_members
from millrace.workers.engine.group.remote.checkpoint import CheckpointIdentity
from millrace.workers.engine.group.remote.connection import Connection
from millrace.workers.engine.group.remote.meeting import Meeting
from millrace.workers.engine.group.remote.member import RemoteMember
from millrace.workers.engine.group.remote.relay import LinkEnds, RankEnd, Relay
from millrace.workers.engine.group.remote.wire import Assignment
from millrace.workers.kernels.stage_link import LinkShape


def join_remote(path: Path, join: Join, shapes: list[LinkShape]) -> list[RemoteMember]:
    """The ranks of the remote stages, none if there are none: each loads as ``join`` says, which
    is what rank 0 does, and is linked to the stages here. ``shapes`` are those of links between
    ranks of one host.

    Raises CheckpointError, and ConfigError for a stage that does not come.
    """
    engine = join.config
    if not engine.remote_stages:
        return []
    identity = CheckpointIdentity.of(path)
    members: list[RemoteMember] = []
    try:
        with Meeting(engine) as meeting:
            first = engine.pipeline_parallel - engine.remote_stages
            for stage in range(first, engine.pipeline_parallel):
                assignment = Assignment(_join_of(stage, join, shapes), *identity)
                # At once, as each host is to hear from here while others are waited for.
                members += _members(stage, join, meeting.take(stage, assignment))
    except BaseException:
        end_members(members)
        raise
    return members


def _join_of(stage: int, join: Join, shapes: list[LinkShape]) -> Join:
    """What the first rank of a remote stage is to load. Its host writes to the link before the
    stage and reads from the one behind it, for whoever does here."""
    shapes = list(shapes)
    shapes[stage] = shapes[stage]._replace(num_readers=1)
    return msgspec.structs.replace(
        join,
        config=_without_secrets(join.config),
        rank=stage * join.config.tensor_parallel,
        cache_fd=-1,
        cache_bytes=0,
        memory_fds=[],
        gloo_folder="",
        link_fds=[],
        link_shapes=shapes,
    )


def _without_secrets(engine: EngineConfig) -> EngineConfig:
    return msgspec.structs.replace(engine, api_key="", stages_token="")


def _members(stage: int, join: Join, connection: Connection) -> list[RemoteMember]:
    """The ranks of a stage, whose relay reads the link before it and writes to the one behind
    it."""
    size = join.config.tensor_parallel
    num_writers = join.link_shapes[stage].num_writers
    links = LinkEnds(
        make_link(join, stage - 1, index=0),
        num_writers=1,
        targets=[make_link(join, stage, index=index) for index in range(num_writers)],
    )
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(size)]
    relay = Relay(connection, links, [RankEnd(theirs, _closed_here) for _, theirs in pairs])
    peer = connection.peer
    members = [
        RemoteMember(stage * size + index, ours, peer, relay)
        for index, (ours, _) in enumerate(pairs)
    ]
    relay.start()
    return members


def _closed_here() -> str:
    return "the group has ended"
