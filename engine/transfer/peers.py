"""Pool of connections to peers."""

from __future__ import annotations

import select
import socket
import threading
import time
from typing import NamedTuple

from millrace.engine.transfer import wire
from millrace.engine.transfer.addresses import host_and_port
from millrace.engine.transfer.client import (
    LocalConnection,
    PeerConnection,
    PulledBlocks,
    PullTarget,
    RemoteConnection,
)
from millrace.engine.transfer.memory import BlockLayout, BlockShape
from millrace.engine.transfer.nixl_agent import NixlAgent
from millrace.engine.transfer.nixl_client import NixlConnection
from millrace.engine.transfer.reslicing import Reslicer
from millrace.engine.transfer.streams import Stream, failed
from millrace.engine.transfer.wire import PeerError
from millrace.schemas.errors import ConfigError
from millrace.schemas.transfer import BlockPart, TransferEndpoint

# Each idle connection maps the peer's memory once.
_MAX_IDLE_PER_PEER, _MAX_IDLE_PEERS = 4, 16
_IDLE_S = 60.0
# Interval at which the watcher picks up connections that have become idle.
_WATCH_MS = 500


class _Idle(NamedTuple):
    """Idle connection and the time since when it is idle."""

    connection: PeerConnection
    since_s: float


class BlockSplit(NamedTuple):
    """Split of own blocks: each rank's part in ``layout``, given by ``parts``.

    Blocks can be pulled from peers of equal ``kind``.
    """

    kind: str
    layout: BlockLayout
    parts: tuple[BlockPart, ...]


class Peers:
    """Connections to other workers' engines, safe for several threads; owns the idle ones."""

    def __init__(
        self,
        split: BlockSplit,
        shape: BlockShape,
        host: str,
        agent: NixlAgent | None = None,
        *,
        nixl_here: bool = False,
    ) -> None:
        """Use ``split`` and ``shape`` of own blocks, and ``host`` for this machine.

        With an ``agent``, peers on other machines that have one, too, are read by NIXL. With
        ``nixl_here``, so are peers on this machine.
        """
        self._agent = agent
        self._nixl_here = nixl_here
        self._split = split
        self._shape = shape
        self._host = host
        self._idle: dict[TransferEndpoint, list[_Idle]] = {}
        self._is_watched = False
        self._lock = threading.Lock()

    def is_local(self, endpoint: TransferEndpoint) -> bool:
        """Return whether the peer's memory can be mapped here."""
        return bool(endpoint.socket) and endpoint.host == self._host

    def _nixl_agent(self, endpoint: TransferEndpoint) -> NixlAgent | None:
        """Return the agent to read the peer's memory with, or None without NIXL."""
        wanted = self._nixl_here or not self.is_local(endpoint)
        return self._agent if wanted and endpoint.nixl else None

    def can_reach(self, endpoint: TransferEndpoint) -> bool:
        """Return whether blocks can be pulled from there at all."""
        return endpoint.layout == self._split.kind and (
            self.is_local(endpoint) or bool(endpoint.address)
        )

    def pull(
        self, endpoint: TransferEndpoint, keys: list[bytes], target: PullTarget, timeout_s: float
    ) -> PulledBlocks:
        """Copy the first of these blocks that a peer has.

        Raises PeerError; the target's contents are undefined then.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._lock:
            kept = self._idle.get(endpoint)
            idle = kept.pop() if kept else None
        if idle is not None:
            try:
                return self._pull(idle.connection, endpoint, keys, target, timeout_s)
            except PeerError:
                # The peer may have closed the idle connection, so try a new one.
                timeout_s = deadline_s - time.monotonic()
        connection = self._connect(endpoint, timeout_s)
        return self._pull(connection, endpoint, keys, target, deadline_s - time.monotonic())

    def _pull(
        self,
        connection: PeerConnection,
        endpoint: TransferEndpoint,
        keys: list[bytes],
        target: PullTarget,
        timeout_s: float,
    ) -> PulledBlocks:
        try:
            pulled = connection.pull(keys, target, timeout_s)
        except BaseException:
            connection.close()
            raise
        self._keep(endpoint, connection)
        return pulled

    def _keep(self, endpoint: TransferEndpoint, connection: PeerConnection) -> None:
        """Keep a connection for reuse; drop the least recently used above the limits."""
        with self._lock:
            kept = [*self._idle.pop(endpoint, []), _Idle(connection, time.monotonic())]
            self._idle[endpoint] = kept[-_MAX_IDLE_PER_PEER:]
            dropped = kept[:-_MAX_IDLE_PER_PEER]
            while len(self._idle) > _MAX_IDLE_PEERS:
                dropped += self._idle.pop(next(iter(self._idle)))
            starts, self._is_watched = not self._is_watched, True
        for idle in dropped:
            idle.connection.close()
        if starts:
            threading.Thread(target=self._watch, name="kv-peers", daemon=True).start()

    def _watch(self) -> None:
        """Close connections whose peer has gone, and so free its memory, while any are idle."""
        while idle := self._all_idle():
            poll = select.poll()
            for one in idle:
                if (fd := one.connection.fileno()) >= 0:  # not closed meanwhile
                    poll.register(fd, select.POLLIN)
            gone = {fd for fd, _ in poll.poll(_WATCH_MS)}
            oldest_s = time.monotonic() - _IDLE_S
            for one in idle:
                is_gone = one.connection.fileno() in gone or one.since_s < oldest_s
                if is_gone and self._take_out(one):
                    one.connection.close()

    def _all_idle(self) -> list[_Idle]:
        with self._lock:
            idle = [one for kept in self._idle.values() for one in kept]
            self._is_watched = bool(idle)
            return idle

    def _take_out(self, idle: _Idle) -> bool:
        """Remove an idle connection; return False if it is gone, because it is in use again."""
        with self._lock:
            for endpoint, kept in self._idle.items():
                if idle in kept:
                    kept.remove(idle)
                    if not kept:
                        del self._idle[endpoint]
                    return True
        return False

    def _connect(self, endpoint: TransferEndpoint, timeout_s: float) -> PeerConnection:
        deadline_s = time.monotonic() + timeout_s
        sock = self._dial(endpoint, timeout_s)
        try:
            agent = self._nixl_agent(endpoint)
            hello = wire.hello(endpoint.token, self._split.kind, by_nixl=agent is not None)
            reslicer = self._reslicer(endpoint)
            timeout_s = deadline_s - time.monotonic()
            if agent is not None:
                stream = Stream(sock, timeout_s)
                name = endpoint.nixl
                return NixlConnection(stream, hello, self._shape, agent, name, reslicer)
            if sock.family == socket.AF_UNIX:
                return LocalConnection(sock, hello, self._shape, timeout_s, reslicer)
            return RemoteConnection(sock, hello, timeout_s, reslicer)
        except BaseException:
            sock.close()
            raise

    def _reslicer(self, endpoint: TransferEndpoint) -> Reslicer | None:
        """Return a reslicer for another split of blocks, or None for the same. Raises PeerError."""
        _, layout, parts = self._split
        if endpoint.parts in ((), parts):
            return None
        return Reslicer(layout, parts, endpoint.parts)

    def _dial(self, endpoint: TransferEndpoint, timeout_s: float) -> socket.socket:
        """Return a connected socket. Raises PeerError."""
        if timeout_s <= 0:
            raise PeerError("it takes too long")
        if self.is_local(endpoint):
            try:
                return _connected(endpoint.socket, timeout_s)
            except OSError as error:
                # A container does not see this machine's folders, so try TCP.
                if not endpoint.address:
                    raise failed(error) from error
        try:
            return socket.create_connection(host_and_port(endpoint.address), timeout_s)
        except OSError as error:
            raise failed(error) from error
        except ConfigError as error:
            raise PeerError(f"{endpoint.address!r:.80} is no address") from error

    def close(self) -> None:
        """Close all idle connections."""
        with self._lock:
            idle, self._idle = self._idle, {}
        for kept in idle.values():
            for one in kept:
                one.connection.close()


def _connected(path: str, timeout_s: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.connect(path)
    except BaseException:
        sock.close()
        raise
    return sock
