"""Choosing ports on a machine where some are taken."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

from millrace.schemas.errors import ConfigError

_TRIES = 200
_PORTS = 65_536


@dataclass
class PortPicker:
    """Hands out ports of one host, until ``close`` none of them again, here or in another process;
    ``moved`` tells what was taken.

    Between the choice of a port and the server that listens there is a moment in which another
    system may choose it, too, and its parts would talk to our server. So a port is claimed by
    binding the UDP port of the same number, which no server here uses: the kernel gives it to one
    at a time, and takes it back however we end.
    """

    host: str = "127.0.0.1"
    moved: list[str] = field(default_factory=list)
    _claims: list[socket.socket] = field(default_factory=list)

    def pick(self, what: str, wanted: int) -> int:
        """``wanted`` or the next free port above it. Raises ConfigError for what is no port, for a
        host that is not this machine's, and when all are taken."""
        if not 1 <= wanted < _PORTS:
            raise ConfigError(f"{what}: a port is between 1 and {_PORTS - 1}, got {wanted}.")
        self._check_host(what)
        for port in range(wanted, min(wanted + _TRIES, _PORTS)):
            if self._claim(port):
                if port != wanted:
                    self.moved.append(f"{what}: port {wanted} is taken, using {port}")
                return port
        last = min(wanted + _TRIES, _PORTS) - 1
        raise ConfigError(f"{what}: no port between {wanted} and {last} is free.")

    def close(self) -> None:
        """Nothing is started on these ports any more."""
        for claim in self._claims:
            claim.close()
        self._claims.clear()

    def _claim(self, port: int) -> bool:
        claim = socket.socket(_family(self.host), socket.SOCK_DGRAM)
        try:
            claim.bind((self.host, port))
        except OSError:
            claim.close()
            return False
        if not is_free(self.host, port):
            claim.close()
            return False
        self._claims.append(claim)
        return True

    def _check_host(self, what: str) -> None:
        with socket.socket(_family(self.host), socket.SOCK_STREAM) as probe:
            try:
                probe.bind((self.host, 0))
            except OSError as error:
                raise ConfigError(
                    f"{what}: {self.host} is not an address of this machine ({error.strerror})."
                ) from error


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
