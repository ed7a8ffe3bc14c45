"""The other end of the socket by which rank 0 speaks with a rank beside the steps."""

from __future__ import annotations

import os
import socket

from millrace.workers.engine.group.control_wire import (
    MAX_PACKET_BYTES,
    FromMember,
    ToMember,
    pack,
    to_member_decoder,
)


class ControlSocket:
    """The member's end of its socket. Once rank 0 is gone, it ends the process: nothing that it
    computes is of use to anyone then."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)

    def receive(self) -> ToMember:
        """The next message; the process ends if there will be none."""
        try:
            packet = self._socket.recv(MAX_PACKET_BYTES)
        except ConnectionError:
            packet = b""
        if not packet:
            os._exit(0)
        return to_member_decoder.decode(packet)

    def send(self, message: FromMember) -> None:
        try:
            self._socket.send(pack(message))
        except OSError:
            os._exit(0)
