"""Relay at each end of a connection between two hosts, which connects it to the host's links."""

from __future__ import annotations

import contextlib
import itertools
import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from millrace.engine.kernels.ranks import RanksFailedError
from millrace.engine.kernels.stage_link import StageLink
from millrace.engine.parallel.control import MAX_PACKET_BYTES
from millrace.engine.parallel.remote import connection as wire
from millrace.engine.parallel.remote.connection import (
    GroupFrameKind,
    Header,
    RankConnection,
    StageError,
)

_log = logging.getLogger(__name__)


class LinkEnds(NamedTuple):
    """Ends of links of a relay.

    It reads ``source``, with a part of each of ``num_writers``, and writes received parts to
    ``targets``, one for each writer. Either may be missing if nothing goes that way.
    """

    source: StageLink | None
    num_writers: int
    targets: list[StageLink]

    @property
    def part_bytes(self) -> int:
        """Most bytes of a part that may be received."""
        return max((target.part_bytes for target in self.targets), default=0)

    def abort(self, why: str) -> None:
        """Wake the threads that wait at the links; may be called from any thread."""
        for link in (*self.targets, *([] if self.source is None else [self.source])):
            link.abort(why)


class RankEnd(NamedTuple):
    """Local end of a rank's socket, and the reason to report when the other end is closed."""

    socket: socket.socket
    how_it_ended: Callable[[], str]


class Relay:
    """Relay of three threads: a sender from the source link, a receiver, and a watcher of ranks.

    Without a source link there is no sender. The watcher serves the ranks' sockets and sends
    heartbeats.

    Any failure ends the whole relay: ``why`` has the reason, the ranks' sockets are shut, and
    ``ended`` is set. The links are aborted only by ``close``, so that ranks that compute here learn
    the reason first. The last thread closes the ranks' sockets and the connection.
    """

    def __init__(
        self, connection: RankConnection, links: LinkEnds, ranks: Sequence[RankEnd]
    ) -> None:
        self.why = ""
        self.ended = threading.Event()
        self._connection = connection
        self._links = links
        self._ranks = ranks
        self._lock = threading.Lock()
        self._num_received = [0] * len(links.targets)
        self._num_running = 0

    def start(self) -> None:
        """Start the threads, and accept the frames of a host that computes."""
        self._connection.limits = wire.computing(self._links.part_bytes)
        loops = {"stage-receive": self._receive, "stage-watch": self._watch_ranks}
        source = self._links.source
        if source is not None:
            loops["stage-send"] = partial(self._send_messages, source)
        self._num_running = len(loops)
        for name, loop in loops.items():
            threading.Thread(target=self._run, args=(loop,), name=name, daemon=True).start()

    def end(self, why: str) -> None:
        """End the relay; the first reason is kept. May be called from any thread."""
        with self._lock:
            if self.ended.is_set():
                return
            self.why = why
            self.ended.set()
        for rank in self._ranks:
            _shut(rank.socket)
        self._connection.end(why)

    def close(self, why: str = "the group has ended") -> None:
        """End the relay and wake the threads that wait at the links."""
        self.end(why)
        self._links.abort(self.why)

    def _run(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except StageError as error:
            self.end(f"the connection to {self._connection.peer} has ended: {error.message}")
        except RanksFailedError as error:
            self.end(str(error))
        except Exception as error:  # noqa: BLE001 (any error ends the connection)
            if not self.ended.is_set():
                _log.exception("lost the connection to a stage of another host")
            self.end(f"{type(error).__name__}: {error}")
        finally:
            with self._lock:
                self._num_running -= 1
                is_last = not self._num_running
            if is_last:
                self._connection.close()
                for rank in self._ranks:
                    rank.socket.close()

    def _send_messages(self, source: StageLink) -> None:
        for number in itertools.count():
            source.wait_written(number, bound=False)
            for writer in range(self._links.num_writers):
                part = source.part(number, writer)
                self._connection.send(GroupFrameKind.MESSAGE, part, at=writer, number=number)
            source.done(number)

    def _receive(self) -> None:
        while True:
            header, body = self._connection.receive()
            if header.kind is GroupFrameKind.MESSAGE:
                self._take_message(header, body)
            elif header.kind is GroupFrameKind.CONTROL:
                if header.at >= len(self._ranks):
                    raise StageError("it sent a message for an unknown rank")
                self._ranks[header.at].socket.send(body)
            elif header.kind is GroupFrameKind.END:
                # Report the other side's reason alone: the connection is not the cause.
                self.end(f"{self._connection.peer} says: {wire.text(body)}")
                return

    def _take_message(self, header: Header, body: bytes) -> None:
        writer, number = header.at, header.number
        if writer >= len(self._links.targets) or number != self._num_received[writer]:
            raise StageError("it sent an unexpected message")
        self._num_received[writer] += 1
        self._links.targets[writer].write(number, body)

    def _watch_ranks(self) -> None:
        by_fd = {rank.socket.fileno(): index for index, rank in enumerate(self._ranks)}
        poll = select.poll()
        for fd in by_fd:
            poll.register(fd, select.POLLIN)
        beat_s = self._connection.beat_s
        next_beat_s = time.monotonic()
        while not self.ended.is_set():
            left_s = next_beat_s - time.monotonic()
            for fd, _ in poll.poll(max(0.0, left_s) * 1e3):
                self._pass_on(by_fd[fd])
            if time.monotonic() >= next_beat_s:
                self._connection.send(GroupFrameKind.BEAT)
                next_beat_s = time.monotonic() + beat_s

    def _pass_on(self, index: int) -> None:
        rank = self._ranks[index]
        try:
            packet = rank.socket.recv(MAX_PACKET_BYTES)
        except OSError:
            packet = b""
        if packet:
            self._connection.send(GroupFrameKind.CONTROL, packet, at=index)
        elif not self.ended.is_set():
            self.end(rank.how_it_ended())


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
