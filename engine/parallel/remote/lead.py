"""Rank 0's side of remote stages: waits for their hosts and represents their ranks."""

from __future__ import annotations

import errno
import logging
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from millrace.engine.config import ResolvedEngineConfig
from millrace.engine.parallel.control import Join, JoinDevices
from millrace.engine.parallel.layout import stages_address
from millrace.engine.parallel.members import Member, end_members
from millrace.engine.parallel.remote import connection as wire
from millrace.engine.parallel.remote.connection import (
    GroupFrameKind,
    RankConnection,
    StageAssignment,
    StageError,
    welcome,
)
from millrace.engine.parallel.remote.relay import LinkEnds, RankEnd, Relay
from millrace.engine.parallel.remote.stage import CheckpointIdentity
from millrace.schemas.errors import ConfigError

# Most time for the greeting of a connection, which may be a stranger's.
_GREETING_TIMEOUT_S = 2.0
# Time to read samples of a large checkpoint from a slow disk.
_ACCEPT_TIMEOUT_S = 60.0
_BACKLOG = 64
_PAUSE_S = 0.1

_log = logging.getLogger(__name__)


class Meeting:
    """Listener for hosts, open from its construction until it is closed.

    Waits up to ``start_timeout_s``, also for an address that another group still uses. Raises
    ConfigError if it cannot listen. Hosts that come too late find no listener, and join the next
    group.
    """

    def __init__(self, engine: ResolvedEngineConfig) -> None:
        self._engine = engine
        self._deadline_s = time.monotonic() + engine.start_timeout_s
        self._why = "no host connected"
        self._listener = self._listen()

    def __enter__(self) -> Meeting:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def take(self, stage: int, assignment: StageAssignment) -> RankConnection:
        """Assign a stage to the next host that joins, with ``rank_timeout_s`` as its silence.

        Raises ConfigError with the stage that no host took in time, or that its host refused.
        """
        connection = self._wait_for(stage)
        try:
            _assign(connection, stage, assignment)
        except BaseException:
            connection.close()
            raise
        connection.set_silence(self._engine.rank_timeout_s)
        return connection

    def _wait_for(self, stage: int) -> RankConnection:
        """Return the connection of a host that knows the token."""
        address = self._engine.stages_address
        _log.info("waiting for a host for stage %d at %s", stage, address)
        while (left_s := self._deadline_s - time.monotonic()) > 0:
            self._listener.settimeout(left_s)
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                break
            try:
                return self._greet(sock)
            except (StageError, OSError) as error:
                sock.close()
                self._why = f"the last connection was rejected: {error}"
                _log.warning("rejected a connection to %s: %s", address, error)
        raise ConfigError(
            f"engine.remote_stages: no host came for stage {stage} to {address} within the "
            f"{self._engine.start_timeout_s:g} s of engine.start_timeout_s ({self._why}). Run "
            "millrace stages --join with this address on another host."
        )

    def _greet(self, sock: socket.socket) -> RankConnection:
        connection = RankConnection(sock, _GREETING_TIMEOUT_S)
        try:
            welcome(connection.reading, self._engine.stages_token)
        except BaseException:
            connection.close()
            raise
        return connection

    def _listen(self) -> socket.socket:
        host, port = stages_address(self._engine.stages_address)
        waits = False
        while True:
            try:
                return _server_at(host, port)
            except OSError as error:
                if time.monotonic() > self._deadline_s or not _is_taken(error):
                    raise _cannot_listen(self._engine, error) from error
            if not waits:
                _log.info("%s is in use, waiting for it to be free", self._engine.stages_address)
            waits = True
            time.sleep(_PAUSE_S)


def _assign(connection: RankConnection, stage: int, assignment: StageAssignment) -> None:
    """Assign a stage to a host. Raises ConfigError with the host's reason if it refuses."""
    connection.set_silence(_ACCEPT_TIMEOUT_S)
    try:
        connection.send(GroupFrameKind.ASSIGNMENT, wire.encode(assignment))
        header, body = connection.receive()
    except StageError as error:
        raise ConfigError(
            f"engine.remote_stages: stage {stage} at {connection.peer} was not taken: "
            f"{error.message}."
        ) from error
    if header.kind is not GroupFrameKind.ACCEPTED:
        raise ConfigError(
            f"engine.remote_stages: stage {stage} is refused by {connection.peer}: "
            f"{wire.text(body)}"
        )


def listen_beside(engine: ResolvedEngineConfig) -> socket.socket:
    """Return a socket that listens at a free port of ``stages_address``. Raises ConfigError."""
    host, _ = stages_address(engine.stages_address)
    try:
        return _server_at(host, 0)
    except OSError as error:
        raise _cannot_listen(engine, error) from error


def _server_at(host: str, port: int) -> socket.socket:
    family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(where[:2], family=family, backlog=_BACKLOG)


def _cannot_listen(engine: ResolvedEngineConfig, error: OSError) -> ConfigError:
    return ConfigError(
        f"engine.stages_address: no host can join at {engine.stages_address}: "
        f"{error.strerror or error}."
    )


def _is_taken(error: OSError) -> bool:
    return error.errno == errno.EADDRINUSE


class RemoteMember(Member):
    """Rank of another host, whose local socket leads to the stage's relay.

    It ends with the connection.
    """

    def __init__(
        self, rank: int, sock: socket.socket, connection: RankConnection, relay: Relay
    ) -> None:
        super().__init__(rank, sock)
        self.name = f"rank {rank} (at {connection.peer})"
        self.our_host = connection.own_host
        """Represent a rank; ``our_host`` is the address at which its host reaches this one."""
        self._relay = relay

    def how_it_ended(self) -> str:
        return f"{self.name} is gone: {self._relay.why}"

    def wait_ended(self) -> None:
        self._relay.close()


class RemoteStage(NamedTuple):
    """Request to load for the first rank of a remote stage, and the links of its relay here."""

    join: Join | JoinDevices
    links: LinkEnds


def join_remote(
    path: Path, engine: ResolvedEngineConfig, stage_of: Callable[[int], RemoteStage]
) -> list[RemoteMember]:
    """Return the ranks of the remote stages, if any; ``stage_of`` describes a stage by number.

    Raises CheckpointError, and ConfigError for a stage that no host takes.
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
                join = msgspec.structs.replace(
                    stage.join, config=msgspec.structs.replace(engine, stages_token="")
                )
                connection = meeting.take(number, StageAssignment(join, *identity))
                # Start the relay at once, so that its host hears from here during the wait for
                # others.
                members += _members(number, engine, connection, stage.links)
    except BaseException:
        end_members(members)
        raise
    return members


def _members(
    number: int, engine: ResolvedEngineConfig, connection: RankConnection, links: LinkEnds
) -> list[RemoteMember]:
    """Return the ranks of a stage."""
    size = engine.tensor_parallel
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(size)]
    relay = Relay(
        connection, links, [RankEnd(theirs, lambda: "the group has ended") for _, theirs in pairs]
    )
    members = [
        RemoteMember(number * size + index, ours, connection, relay)
        for index, (ours, _) in enumerate(pairs)
    ]
    relay.start()
    return members
