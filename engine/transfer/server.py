"""Serves blocks to peers: a thread for each socket that is listened on, and one for each peer."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from millrace.engine.transfer import wire
from millrace.engine.transfer.checksum import checksum_of
from millrace.engine.transfer.errors import PeerError
from millrace.engine.transfer.loans import Lender
from millrace.engine.transfer.nixl_agent import NixlAgent
from millrace.engine.transfer.streams import PeerGoneError, Stream

_log = logging.getLogger(__name__)

# Each has a thread, which waits most of the time.
_MAX_PEERS = 256
_HELLO_TIMEOUT_S = 2.0
_FRAME_TIMEOUT_S = 2.0
# A peer that asks for nothing for so long may connect again.
_IDLE_TIMEOUT_S = 300.0
# Between two tries to accept where the system has no room for another connection.
_ACCEPT_PAUSE_S = 0.1
# While a peer reads by NIXL: how long UCX is called at short intervals, and the short and the later
# ones.
_BUSY_S, _BUSY_PAUSE_S, _PAUSE_MS = 0.02, 50e-6, 1


@dataclass(frozen=True)
class PeerIdentity:
    """What peers have to show: the token, and that their blocks are of the same layout. A loan
    lasts ``loan_s`` at most."""

    token: str = field(repr=False)
    layout: str
    loan_s: float


class BlockServer:
    """Owns its sockets: it serves from ``start`` until ``close``. What a peer does ends its own
    connection at most, with one line in the log."""

    def __init__(
        self,
        lender: Lender,
        identity: PeerIdentity,
        listeners: Sequence[socket.socket],
        agent: NixlAgent | None = None,
    ) -> None:
        """With an ``agent``, which has registered the lender's regions, peers may read by NIXL."""
        self._lender = lender
        self._agent = agent
        self._identity = identity
        self._listeners = listeners
        self._peers: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._is_closed = threading.Event()

    def start(self) -> None:
        """Begin to serve."""
        for listener in self._listeners:
            threading.Thread(
                target=self._accept, args=(listener,), name="kv-accept", daemon=True
            ).start()

    def close(self) -> None:
        """End all connections."""
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
            serve_peer(sock, self._lender, self._identity, self._agent)
        except PeerGoneError:
            pass
        except PeerError as error:
            _log.warning("a peer of the KV cache is served no more: %s", error.message)
        except Exception:  # noqa: BLE001 (whatever it is, it ends one connection only)
            _log.exception("a peer of the KV cache could not be served")
        finally:
            with self._lock:
                self._peers.discard(sock)
            sock.close()


def serve_peer(
    sock: socket.socket, lender: Lender, identity: PeerIdentity, agent: NixlAgent | None = None
) -> None:
    """Answer one peer until it goes. Raises PeerError; PeerGoneError when it went as it should."""
    stream = Stream(sock, _HELLO_TIMEOUT_S)
    hello = stream.receive(wire.HELLO_BYTES, may_end=True)
    by_nixl = wire.check_hello(hello, identity.token, identity.layout)
    is_local = sock.family == socket.AF_UNIX
    if not is_local:
        stream.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    read_by: NixlAgent | None = None
    if by_nixl:
        read_by = _tell_agent(stream, lender, agent)
        # Reads that were given up may be on their way since an earlier connection.
        _let_read(stream, read_by, time.monotonic() + _FRAME_TIMEOUT_S)
    elif is_local:
        _hand_over(sock, lender)
    else:
        stream.send(wire.welcome([]))
    while True:
        stream.allow(_IDLE_TIMEOUT_S)
        header = stream.receive(wire.HEADER_BYTES, may_end=True)
        _, _, size = wire.parse_header(header, wire.TransferFrameKind.LEND)
        stream.allow(_FRAME_TIMEOUT_S)
        keys = wire.parse_keys(stream.receive(size))
        loan = lender.ask(keys)
        try:
            places = loan.wait(identity.loan_s)
            stream.allow(identity.loan_s)
            if is_local or by_nixl:
                stream.send(wire.lent(places))
                if read_by is not None:
                    _let_read(stream, read_by, stream.deadline_s)
                stream.receive_frame(wire.TransferFrameKind.DONE)
            else:
                _send_blocks(stream, lender, places)
        finally:
            is_valid = loan.end()
        stream.allow(_FRAME_TIMEOUT_S)
        stream.send(wire.over(is_valid=is_valid))


def _hand_over(sock: socket.socket, lender: Lender) -> None:
    """Say where the memory is, with the files that it is in."""
    shapes = [region.shape for region in lender.regions]
    sock.settimeout(_FRAME_TIMEOUT_S)
    data = wire.welcome(shapes)
    try:
        sent = socket.send_fds(sock, [data], [region.fd for region in lender.regions])
    except OSError as error:
        raise PeerError(f"the connection failed: {error.strerror or error}") from error
    if sent != len(data):  # it is smaller than any buffer
        raise PeerError("it takes nothing")


def _tell_agent(stream: Stream, lender: Lender, agent: NixlAgent | None) -> NixlAgent:
    """Say where the memory is, and how NIXL gets there: by this agent."""
    if agent is None:
        raise PeerError("it wants to read by NIXL, which is not used here")
    blocks = [region.blocks for region in lender.regions]
    shapes = [region.shape for region in lender.regions]
    addresses = [one.ctypes.data for one in blocks]
    stream.send(wire.agent(wire.Agent(shapes, addresses, agent.metadata)))
    return agent


def _let_read(stream: Stream, agent: NixlAgent, until_s: float) -> None:
    """Have UCX do its part of what the peer reads, until that says something."""
    begin_s = time.monotonic()
    while not stream.hears(0) and (now_s := time.monotonic()) < until_s:
        agent.progress()
        if now_s - begin_s < _BUSY_S:
            time.sleep(_BUSY_PAUSE_S)
        else:
            stream.hears(_PAUSE_MS)


def _send_blocks(stream: Stream, lender: Lender, places: Sequence[int]) -> None:
    stream.send(wire.frame(wire.TransferFrameKind.SENT, len(places)))
    regions = [region.blocks for region in lender.regions]
    for place in places:
        region, number = wire.region_and_number(place)
        pieces = [memoryview(layer) for layer in regions[region][:, number]]
        checksum = wire.CHECKSUM.pack(checksum_of(pieces))
        stream.send_pieces([memoryview(checksum), *pieces])


def _shut(sock: socket.socket) -> None:
    """Wake whoever waits for it."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
