"""Host of `millrace stages`: computes stages of a worker's groups, one group after another."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from millrace.engine.parallel.remote import connection as wire
from millrace.engine.parallel.remote.connection import (
    GroupFrameKind,
    RankConnection,
    StageAssignment,
    StageError,
    greet,
)
from millrace.engine.parallel.remote.stage import Slot, Stage
from millrace.runtime.retry import doubling_delays
from millrace.schemas.errors import MillraceError

_CONNECT_TIMEOUT_S = 5.0
# The worker may first check the checkpoints of other hosts.
_ANSWER_TIMEOUT_S = 60.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0

_log = logging.getLogger(__name__)


class Joining(NamedTuple):
    """Settings of a host that joins: the worker's address, the token, the path and the stages.

    ``path`` is the checkpoint's on this host, or None for the worker's path. ``max_stages`` is the
    number of stages computed at a time.
    """

    address: tuple[str, int]
    token: str
    path: Path | None
    max_stages: int


class StageHost:
    """Host that joins a worker's group for each stage that it may compute.

    It joins again when a group has ended, until ``stop`` or until one side refuses the other. Owns
    the ranks: all have ended when ``run`` returns.
    """

    def __init__(self, joining: Joining) -> None:
        self._joining = joining
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._stages: set[Stage] = set()
        self._refused: MillraceError | None = None

    def run(self) -> None:
        """Serve groups until stopped.

        Raises StageRefusedError, ConfigError or CheckpointError for errors that a retry does not
        fix.
        """
        threads = [
            threading.Thread(target=self._serve_slot, args=(slot,), name=f"stage-{slot}")
            for slot in range(self._joining.max_stages)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._refused is not None:
            raise self._refused

    def stop(self) -> None:
        """Stop; may be called from any thread and from a signal handler.

        A new thread takes the lock, because the handler may interrupt its holder.
        """
        self._stopping.set()
        threading.Thread(target=self._wake, name="stages-stop").start()

    def _wake(self) -> None:
        with self._lock:
            stages, sockets = list(self._stages), list(self._sockets)
        for stage in stages:
            stage.end("the host was told to stop")
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _serve_slot(self, slot: int) -> None:
        said = ""
        delays = doubling_delays(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while not self._stopping.is_set():
            try:
                why = said = self._serve_group(slot)
                _log.info("the group has ended: %s", why)
                delays = doubling_delays(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
            except MillraceError as error:
                if isinstance(error, StageError) and error.retryable:
                    why = error.message
                else:
                    self._refused = error
                    self.stop()
                    return
            except OSError as error:
                why = error.strerror or str(error)
            if why != said:
                _log.info("joining %s:%d again: %s", *self._joining.address, why)
            said = why
            self._stopping.wait(next(delays))

    def _serve_group(self, slot: int) -> str:
        """Compute a stage of the next group until the group ends; return the reason of its end.

        Raises StageError and OSError if there is no group, other errors for a refusal.
        """
        sock = socket.create_connection(self._joining.address, _CONNECT_TIMEOUT_S)
        connection = RankConnection(sock, _ANSWER_TIMEOUT_S)
        try:
            with self._waking(sock):
                greet(connection.reading, self._joining.token)
                assignment = self._receive_assignment(connection)
                stage = self._accept(connection, assignment, slot)
        except BaseException:
            connection.close()
            raise
        _log.info("%s of the group of %s", stage.name, connection.peer)
        with self._lock:
            self._stages.add(stage)
        try:
            stage.start()
            if self._stopping.is_set():
                stage.end("the host was told to stop")
            return stage.wait()
        finally:
            with self._lock:
                self._stages.discard(stage)
            stage.close()

    @contextlib.contextmanager
    def _waking(self, sock: socket.socket) -> Iterator[None]:
        """Register a socket, so that ``stop`` wakes the thread that waits for it."""
        with self._lock:
            self._sockets.add(sock)
        try:
            if self._stopping.is_set():
                raise StageError("it was told to stop")
            yield
        finally:
            with self._lock:
                self._sockets.discard(sock)

    def _receive_assignment(self, connection: RankConnection) -> StageAssignment:
        header, body = connection.receive()
        if header.kind is not GroupFrameKind.ASSIGNMENT:
            raise StageError("it sent an invalid frame")
        return wire.decode(body, StageAssignment)

    def _accept(self, connection: RankConnection, assignment: StageAssignment, slot: int) -> Stage:
        """Prepare an assigned stage; an error is reported to the worker and raised."""
        try:
            place = Slot(self._joining.path, slot, self._joining.max_stages)
            stage = Stage(connection, assignment, place)
        except MillraceError as error:
            with contextlib.suppress(StageError):
                connection.send(GroupFrameKind.REFUSED, wire.encode_text(error.message))
            raise
        connection.send(GroupFrameKind.ACCEPTED)
        return stage
