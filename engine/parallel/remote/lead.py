"""How rank 0 waits for the hosts that compute the last stages, and the ranks that these have."""

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

# What a stranger may take of the time of those who are waited for.
_GREETING_TIMEOUT_S = 2.0
# Reading samples of a large checkpoint from a disk that is slow.
_ACCEPT_TIMEOUT_S = 60.0
_BACKLOG = 64
_PAUSE_S = 0.1

_log = logging.getLogger(__name__)


class Meeting:
    """Listens from when it is made, for as long as the engine may take to start, until it is
    closed. Raises ConfigError if it cannot; a group that is met at the same address is waited for.

    Hosts who come later than they are needed find nobody, and join the next group.
    """

    def __init__(self, engine: ResolvedEngineConfig) -> None:
        self._engine = engine
        self._deadline_s = time.monotonic() + engine.start_timeout_s
        self._why = "nobody came"
        self._listener = self._listen()

    def __enter__(self) -> Meeting:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def take(self, stage: int, assignment: StageAssignment) -> RankConnection:
        """Have the next host that comes compute a stage, from which it hears within
        ``rank_timeout_s`` again. Raises ConfigError naming the stage that has no host in time, or
        that its host refuses."""
        connection = self._wait_for(stage)
        try:
            _assign(connection, stage, assignment)
        except BaseException:
            connection.close()
            raise
        connection.set_silence(self._engine.rank_timeout_s)
        return connection

    def _wait_for(self, stage: int) -> RankConnection:
        """A host that knows the token."""
        address = self._engine.stages_address
        _log.info("stage %d is waited for at %s", stage, address)
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
                self._why = f"the last who did was turned away: {error}"
                _log.warning("one who came to %s is no stage: %s", address, error)
        raise ConfigError(
            f"engine.remote_stages: no host came for stage {stage} to {address} within the "
            f"{self._engine.start_timeout_s:g} s of engine.start_timeout_s ({self._why}). Start "
            "millrace stages --join with this address there."
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
                    raise _nobody_can_join(self._engine, error) from error
            if not waits:
                _log.info("%s is taken, and waited for", self._engine.stages_address)
            waits = True
            time.sleep(_PAUSE_S)


def _assign(connection: RankConnection, stage: int, assignment: StageAssignment) -> None:
    """Have a host take a stage. Raises ConfigError with its reason if it does not."""
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
    """A socket that listens at some port of the host of ``stages_address``. Raises ConfigError."""
    host, _ = stages_address(engine.stages_address)
    try:
        return _server_at(host, 0)
    except OSError as error:
        raise _nobody_can_join(engine, error) from error


def _server_at(host: str, port: int) -> socket.socket:
    family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(where[:2], family=family, backlog=_BACKLOG)


def _nobody_can_join(engine: ResolvedEngineConfig, error: OSError) -> ConfigError:
    return ConfigError(
        f"engine.stages_address: nobody can join at {engine.stages_address}: "
        f"{error.strerror or error}."
    )


def _is_taken(error: OSError) -> bool:
    return error.errno == errno.EADDRINUSE


class RemoteMember(Member):
    """Its socket is one of this host, at whose other end the stage's relay is. It ends with the
    connection."""

    def __init__(
        self, rank: int, sock: socket.socket, connection: RankConnection, relay: Relay
    ) -> None:
        super().__init__(rank, sock)
        self.name = f"rank {rank} (at {connection.peer})"
        self.our_host = connection.own_host
        """Where that host reaches this one."""
        self._relay = relay

    def how_it_ended(self) -> str:
        return f"{self.name} is gone: {self._relay.why}"

    def wait_ended(self) -> None:
        self._relay.close()


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
                join = msgspec.structs.replace(
                    stage.join, config=msgspec.structs.replace(engine, stages_token="")
                )
                connection = meeting.take(number, StageAssignment(join, *identity))
                # At once, as each host is to hear from here while others are waited for.
                members += _members(number, engine, connection, stage.links)
    except BaseException:
        end_members(members)
        raise
    return members


def _members(
    number: int, engine: ResolvedEngineConfig, connection: RankConnection, links: LinkEnds
) -> list[RemoteMember]:
    """The ranks of a stage."""
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
