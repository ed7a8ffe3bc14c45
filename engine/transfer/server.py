"""Server of blocks to peers, with a thread for each listening socket and for each peer."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from millrace.engine.transfer import wire
from millrace.engine.transfer.memory import Region, checksum_of
from millrace.engine.transfer.nixl_agent import NixlAgent
from millrace.engine.transfer.streams import PeerGoneError, Stream
from millrace.engine.transfer.wire import PeerError


class Loan:
    """Loan of blocks to a peer: requested, granted, over.

    Used by two threads: the engine's grants and expires it, the peer's thread waits for it and ends
    it. ``end`` returns whether the blocks were valid until now. ``on_end`` is called once, with a
    granted loan that the peer has ended.
    """

    def __init__(self, keys: list[bytes], on_end: Callable[[Loan], None]) -> None:
        self.keys = keys
        self.places: Sequence[int] = ()
        self._on_end = on_end
        self._lock = threading.Lock()
        self._is_granted = False
        self._is_over = False
        self._answered = threading.Event()

    def grant(self, places: Sequence[int]) -> bool:
        """Lend the blocks at these places; return False if the loan is over already."""
        with self._lock:
            if self._is_over:
                return False
            self.places = places
            self._is_granted = True
        self._answered.set()
        return True

    def expire(self) -> bool:
        """End the loan from the engine's side; return False if the peer has ended it before."""
        with self._lock:
            was_over, self._is_over = self._is_over, True
        self._answered.set()
        return not was_over

    def wait(self, timeout_s: float) -> Sequence[int]:
        """Return the places of the granted blocks, or none after the timeout."""
        self._answered.wait(timeout_s)
        return self.places

    def end(self) -> bool:
        """End the loan from the peer's side; return whether the blocks read are valid."""
        with self._lock:
            was_over, self._is_over = self._is_over, True
        if was_over:
            return False
        if self._is_granted:
            self._on_end(self)
        return True


_log = logging.getLogger(__name__)

# Each peer has a thread, which waits most of the time.
_MAX_PEERS = 256
_HELLO_TIMEOUT_S = 2.0
_FRAME_TIMEOUT_S = 2.0
# A peer without a request for this time is disconnected and may connect again.
_IDLE_TIMEOUT_S = 300.0
# Pause after a failed accept, if the system has no room for another connection.
_ACCEPT_PAUSE_S = 0.1
# Polling of UCX while a peer reads by NIXL: time at the short interval, the short interval, and the
# interval afterwards.
_BUSY_S, _BUSY_PAUSE_S, _PAUSE_MS = 0.02, 50e-6, 1


@dataclass(frozen=True)
class PeerIdentity:
    """Identity that peers have to prove: the token and the layout of blocks.

    A loan lasts at most ``loan_s``.
    """

    token: str = field(repr=False)
    layout: str
    loan_s: float


class BlockServer:
    """Server of blocks from ``start`` until ``close``; owns its sockets.

    An error of a peer ends its own connection only, with one line in the log.
    """

    def __init__(
        self,
        regions: Sequence[Region],
        ask: Callable[[list[bytes]], Loan],
        identity: PeerIdentity,
        listeners: Sequence[socket.socket],
        agent: NixlAgent | None = None,
    ) -> None:
        """Serve lent blocks from the memory of ``regions``.

        ``ask``, which any thread may call, asks for the first blocks of a prefix. With an
        ``agent``, which has registered the regions, peers may read by NIXL.
        """
        self._regions = regions
        self._ask = ask
        self._agent = agent
        self._identity = identity
        self._listeners = listeners
        self._peers: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._is_closed = threading.Event()

    def start(self) -> None:
        """Start the threads."""
        for listener in self._listeners:
            threading.Thread(
                target=self._accept, args=(listener,), name="kv-accept", daemon=True
            ).start()

    def close(self) -> None:
        """Close all connections."""
        self._is_closed.set()
        with self._lock:
            for sock in (*self._listeners, *self._peers):
                _shut(sock)
        for listener in self._listeners:
            listener.close()

    def _accept(self, listener: socket.socket) -> None:
        while not self._is_closed.is_set():
            try:
                sock, _ = listener.accept()
            except OSError:
                if not self._is_closed.is_set():
                    self._is_closed.wait(_ACCEPT_PAUSE_S)
                continue
            with self._lock:
                has_room = len(self._peers) < _MAX_PEERS and not self._is_closed.is_set()
                if has_room:
                    self._peers.add(sock)
            if not has_room:
                sock.close()
                continue
            threading.Thread(target=self._serve, args=(sock,), name="kv-peer", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            self._answer(sock)
        except PeerGoneError:
            pass
        except PeerError as error:
            _log.warning("closed the connection of a peer of the KV cache: %s", error.message)
        except Exception:  # noqa: BLE001 (any error ends one connection only)
            _log.exception("failed to serve a peer of the KV cache")
        finally:
            with self._lock:
                self._peers.discard(sock)
            sock.close()

    def _answer(self, sock: socket.socket) -> None:
        """Answer a peer until it goes. Raises PeerError; PeerGoneError after a regular end."""
        identity = self._identity
        stream = Stream(sock, _HELLO_TIMEOUT_S)
        hello = stream.receive(wire.HELLO_BYTES, may_end=True)
        by_nixl = wire.check_hello(hello, identity.token, identity.layout)
        is_local = sock.family == socket.AF_UNIX
        if not is_local:
            stream.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        read_by: NixlAgent | None = None
        if by_nixl:
            read_by = _tell_agent(stream, self._regions, self._agent)
            # Abandoned reads of an earlier connection may still be in flight.
            _let_read(stream, read_by, time.monotonic() + _FRAME_TIMEOUT_S)
        elif is_local:
            _hand_over(sock, self._regions)
        else:
            stream.send(wire.welcome([]))
        while True:
            stream.allow(_IDLE_TIMEOUT_S)
            header = stream.receive(wire.HEADER_BYTES, may_end=True)
            _, _, size = wire.parse_header(header, wire.TransferFrameKind.LEND)
            stream.allow(_FRAME_TIMEOUT_S)
            keys = wire.parse_keys(stream.receive(size))
            loan = self._ask(keys)
            try:
                places = loan.wait(identity.loan_s)
                stream.allow(identity.loan_s)
                if is_local or by_nixl:
                    stream.send(wire.lent(places))
                    if read_by is not None:
                        _let_read(stream, read_by, stream.deadline_s)
                    stream.receive_frame(wire.TransferFrameKind.DONE)
                else:
                    _send_blocks(stream, self._regions, places)
            finally:
                is_valid = loan.end()
            stream.allow(_FRAME_TIMEOUT_S)
            stream.send(wire.over(is_valid=is_valid))


def _hand_over(sock: socket.socket, regions: Sequence[Region]) -> None:
    """Send the shapes of the memory together with its files."""
    shapes = [region.shape for region in regions]
    sock.settimeout(_FRAME_TIMEOUT_S)
    data = wire.welcome(shapes)
    try:
        sent = socket.send_fds(sock, [data], [region.fd for region in regions])
    except OSError as error:
        raise PeerError(f"the connection failed: {error.strerror or error}") from error
    if sent != len(data):  # impossible: any socket buffer is larger
        raise PeerError("it takes nothing")


def _tell_agent(stream: Stream, regions: Sequence[Region], agent: NixlAgent | None) -> NixlAgent:
    """Send the memory's addresses and NIXL's metadata; return the agent that serves the reads."""
    if agent is None:
        raise PeerError("it asks to read by NIXL, which is not enabled here")
    blocks = [region.blocks for region in regions]
    shapes = [region.shape for region in regions]
    addresses = [one.ctypes.data for one in blocks]
    stream.send(wire.agent(wire.Agent(shapes, addresses, agent.metadata)))
    return agent


def _let_read(stream: Stream, agent: NixlAgent, until_s: float) -> None:
    """Let UCX progress on the peer's reads until the peer sends something."""
    begin_s = time.monotonic()
    while not stream.hears(0) and (now_s := time.monotonic()) < until_s:
        agent.progress()
        if now_s - begin_s < _BUSY_S:
            time.sleep(_BUSY_PAUSE_S)
        else:
            stream.hears(_PAUSE_MS)


def _send_blocks(stream: Stream, regions: Sequence[Region], places: Sequence[int]) -> None:
    stream.send(wire.frame(wire.TransferFrameKind.SENT, len(places)))
    for place in places:
        region, number = wire.region_and_number(place)
        pieces = [memoryview(layer) for layer in regions[region].blocks[:, number]]
        checksum = wire.CHECKSUM.pack(checksum_of(pieces))
        stream.send_pieces([memoryview(checksum), *pieces])


def _shut(sock: socket.socket) -> None:
    """Shut a socket down, which wakes the threads that wait for it."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
