"""A rank of another host, as rank 0 sees it."""

from __future__ import annotations

import socket

from millrace.engine.parallel.group.members import Member
from millrace.engine.parallel.group.remote.connection import Connection
from millrace.engine.parallel.group.remote.relay import Relay


class RemoteMember(Member):
    """Its socket is one of this host, at whose other end the stage's relay is. It ends with the
    connection."""

    def __init__(
        self, rank: int, sock: socket.socket, connection: Connection, relay: Relay
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
