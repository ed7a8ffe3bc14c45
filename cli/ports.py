"""Choosing ports on a machine where some are taken."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

_TRIES = 200


@dataclass
class PortPicker:
    """Hands out loopback ports, never the same one twice; ``moved`` tells what was taken."""

    host: str = "127.0.0.1"
    moved: list[str] = field(default_factory=list)
    _given: set[int] = field(default_factory=set)

    def pick(self, what: str, wanted: int) -> int:
        """``wanted`` or the next free port above it."""
        for port in range(wanted, min(wanted + _TRIES, 65_536)):
            if port not in self._given and is_free(self.host, port):
                self._given.add(port)
                if port != wanted:
                    self.moved.append(f"{what}: port {wanted} is taken, using {port}")
                return port
        raise OSError(f"no free port for {what} between {wanted} and {wanted + _TRIES - 1}")


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True
