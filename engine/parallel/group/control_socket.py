"""The other end of the socket by which rank 0 speaks with a rank beside the steps."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable

from millrace.engine.parallel.group.control_wire import (
    MAX_PACKET_BYTES,
    AdapterLoaded,
    FromMember,
    LoadAdapter,
    ToMember,
    pack,
    to_member_decoder,
)
from millrace.schemas.errors import MillraceError

_log = logging.getLogger(__name__)


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

    def answer(self, load: LoadAdapter, read: Callable[[LoadAdapter], None]) -> None:
        """Have an adapter read, and say that it is there, or why it is not."""
        error = ""
        try:
            read(load)
        except MillraceError as refused:
            error = refused.message
        except Exception as failed:  # noqa: BLE001 (whatever it is, rank 0 is told)
            _log.exception("a rank could not load an adapter")
            error = f"{type(failed).__name__}: {failed}"
        self.send(AdapterLoaded(load.number, error))

    def send(self, message: FromMember) -> None:
        try:
            self._socket.send(pack(message))
        except OSError:
            os._exit(0)
