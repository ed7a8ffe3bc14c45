"""Choosing ports on a machine where some are taken."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

from schemas.errors import ConfigError

_TRIES = 200
_PORTS = 65_536


@dataclass
class PortPicker:
    """Hands out loopback ports, never the same one twice and none that is ``given`` already;
    ``moved`` tells what was taken."""

    host: str = "127.0.0.1"
    given: set[int] = field(default_factory=set)
    moved: list[str] = field(default_factory=list)

    def pick(self, what: str, wanted: int) -> int:
        """``wanted`` or the next free port above it. Raises ConfigError for what is no port, for a
        host that is not this machine's, and when all are taken."""
        if not 1 <= wanted < _PORTS:
            raise ConfigError(f"{what}: a port is between 1 and {_PORTS - 1}, got {wanted}.")
        self._check_host(what)
        for port in range(wanted, min(wanted + _TRIES, _PORTS)):
            if port not in self.given and is_free(self.host, port):
                self.given.add(port)
                if port != wanted:
                    self.moved.append(f"{what}: port {wanted} is taken, using {port}")
                return port
        last = min(wanted + _TRIES, _PORTS) - 1
        raise ConfigError(f"{what}: no port between {wanted} and {last} is free.")

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
