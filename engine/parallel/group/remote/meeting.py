"""Where rank 0 waits for the hosts that compute the last stages."""

from __future__ import annotations

import errno
import logging
import socket
import time

from millrace.engine.config import ResolvedEngineConfig
from millrace.engine.parallel.group.remote import wire
from millrace.engine.parallel.group.remote.connection import Connection
from millrace.engine.parallel.group.remote.errors import StageError
from millrace.engine.parallel.group.remote.handshake import welcome
from millrace.engine.parallel.group.remote.wire import Assignment, Kind
from millrace.engine.transfer.addresses import host_and_port
from millrace.runtime.addresses import is_loopback
from millrace.schemas.config import EngineConfig
from millrace.schemas.errors import ConfigError

# What a stranger may take of the time of those who are waited for.
_GREETING_TIMEOUT_S = 2.0
# Reading samples of a large checkpoint from a disk that is slow.
_ACCEPT_TIMEOUT_S = 60.0
_BACKLOG = 64
_PAUSE_S = 0.1

_log = logging.getLogger(__name__)


def check_remote_stages(engine: EngineConfig) -> None:
    """Raise ConfigError for stages of other hosts that there cannot be."""
    if not 0 <= engine.remote_stages < engine.pipeline_parallel:
        raise ConfigError(
            f"engine.remote_stages is {engine.remote_stages}: of the {engine.pipeline_parallel} "
            "stages of engine.pipeline_parallel the first one is here."
        )
    if not engine.remote_stages:
        return
    host, _ = _address(engine.stages_address)
    if not engine.stages_token and not is_loopback(host):
        raise ConfigError(
            f"engine.stages_address is {engine.stages_address}, where other machines can join: set "
            "engine.stages_token, by MILLRACE_WORKER__ENGINE__STAGES_TOKEN_FILE for one, and give "
            "millrace stages the same."
        )


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

    def take(self, stage: int, assignment: Assignment) -> Connection:
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

    def _wait_for(self, stage: int) -> Connection:
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

    def _greet(self, sock: socket.socket) -> Connection:
        connection = Connection(sock, _GREETING_TIMEOUT_S)
        try:
            welcome(connection.reading, self._engine.stages_token)
        except BaseException:
            connection.close()
            raise
        return connection

    def _listen(self) -> socket.socket:
        host, port = _address(self._engine.stages_address)
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


def _assign(connection: Connection, stage: int, assignment: Assignment) -> None:
    """Have a host take a stage. Raises ConfigError with its reason if it does not."""
    connection.set_silence(_ACCEPT_TIMEOUT_S)
    try:
        connection.send(Kind.ASSIGNMENT, wire.encode(assignment))
        header, body = connection.receive()
    except StageError as error:
        raise ConfigError(
            f"engine.remote_stages: stage {stage} at {connection.peer} was not taken: "
            f"{error.message}."
        ) from error
    if header.kind is not Kind.ACCEPTED:
        raise ConfigError(
            f"engine.remote_stages: stage {stage} is refused by {connection.peer}: "
            f"{wire.text(body)}"
        )


def listen_beside(engine: ResolvedEngineConfig) -> socket.socket:
    """A socket that listens at some port of the host of ``stages_address``. Raises ConfigError."""
    host, _ = _address(engine.stages_address)
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


def _address(address: str) -> tuple[str, int]:
    return host_and_port(address, "engine.stages_address")


def _is_taken(error: OSError) -> bool:
    return error.errno == errno.EADDRINUSE
