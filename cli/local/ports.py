"""Ports of this machine: choice of free ports, and processes that listen on the others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import ssl
import urllib.error
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from millrace.cli.endpoints import LOOPBACK, url
from millrace.runtime.addresses import open_directly
from millrace.schemas.config import GatewayConfig
from millrace.schemas.errors import ConfigError

_TRIES = 200
_PORTS = 65_536
# Range for any free port, below the range of outgoing connections.
_ANY = range(20_000, 30_000)


class PortTakenError(ConfigError):
    """Error if a requested port is already in use."""


@dataclass
class PortPicker:
    """Allocator of ports of one host. No port is handed out twice until ``close``, here or in
    another process; ``moved`` records replaced ports.

    Between the choice of a port and the start of its server, another system could choose it, too,
    and its parts would talk to the wrong server. So a port is claimed by binding the UDP port of
    the same number, which no server here uses: the kernel gives it to one process at a time and
    releases it when the process ends.
    """

    host: str = "127.0.0.1"
    moved: list[str] = field(default_factory=list)
    _claims: list[socket.socket] = field(default_factory=list)

    def pick_any(self, what: str) -> int:
        """Return any free port. Raises ConfigError as ``pick`` does."""
        self._check(what, _ANY[0])
        for port in random.sample(_ANY, _TRIES):
            if self._claim(port):
                return port
        raise ConfigError(f"{what}: no port between {_ANY[0]} and {_ANY[-1]} is free.")

    def pick_exactly(self, what: str, wanted: int) -> int:
        """Claim ``wanted`` and return it.

        Raises PortTakenError, which names the process if it is known, and ConfigError as ``pick``
        does.
        """
        self._check(what, wanted)
        if self._claim(wanted):
            return wanted
        holder = holder_of(wanted)
        raise PortTakenError(
            f"{what}: port {wanted} is taken{f' ({holder})' if holder else ''}. Stop what listens "
            "there, name another port with --port, or let --port 0 find a free one."
        )

    def pick(self, what: str, wanted: int) -> int:
        """Return ``wanted`` or the next free port above it.

        Raises ConfigError for an invalid port, for a host that is not this machine's, and if all
        ports are taken.
        """
        self._check(what, wanted)
        for port in range(wanted, min(wanted + _TRIES, _PORTS)):
            if self._claim(port):
                if port != wanted:
                    self.moved.append(f"{what}: port {wanted} is taken, using {port}")
                return port
        last = min(wanted + _TRIES, _PORTS) - 1
        raise ConfigError(f"{what}: no port between {wanted} and {last} is free.")

    def close(self) -> None:
        """Release all claims."""
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

    def _check(self, what: str, wanted: int) -> None:
        if not 1 <= wanted < _PORTS:
            raise ConfigError(f"{what}: a port is between 1 and {_PORTS - 1}, got {wanted}.")
        with socket.socket(_family(self.host), socket.SOCK_STREAM) as probe:
            try:
                probe.bind((self.host, 0))
            except OSError as error:
                raise ConfigError(
                    f"{what}: {self.host} is not an address of this machine ({error.strerror})."
                ) from error


def is_free(host: str, port: int) -> bool:
    """Return whether a server could listen there now."""
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


_LISTENS = "0A"
_MOST_SHOWN = 80


def holder_of(port: int) -> str | None:
    """Return the pid and command line of the process that listens on a TCP port; None if the port
    is free or the process belongs to another user."""
    inodes = {inode for table in ("tcp", "tcp6") for inode in _listening(table, port)}
    if not inodes:
        return None
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for process in Path("/proc").iterdir():
        if process.name.isdecimal() and _has_open(process, wanted):
            return f"pid {process.name}, {_command_line(process)}"
    return None


def _has_open(process: Path, wanted: set[str]) -> bool:
    # Processes and files may disappear during the loop, and those of other users are not readable.
    with contextlib.suppress(OSError):
        for file in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                if str(file.readlink()) in wanted:
                    return True
    return False


def _listening(table: str, port: int) -> list[str]:
    try:
        lines = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    except OSError:
        return []
    rows = [line.split() for line in lines]
    return [
        row[9] for row in rows if row[3] == _LISTENS and int(row[1].rpartition(":")[2], 16) == port
    ]


def _command_line(process: Path) -> str:
    words: list[bytes] = []
    with contextlib.suppress(OSError):
        words = (process / "cmdline").read_bytes().split(b"\0")
    shown = " ".join(word.decode(errors="replace") for word in words).strip()
    return shown if len(shown) <= _MOST_SHOWN else f"{shown[: _MOST_SHOWN - 1]}…"


async def listens(port: int) -> bool:
    """Return whether a server of this machine listens there."""
    try:
        _reader, writer = await asyncio.open_connection(LOOPBACK, port)
    except OSError:
        return False
    writer.close()
    return True


def _any_certificate() -> ssl.SSLContext:
    """Return a TLS context that accepts any certificate: for connections to our own parts, whose
    certificate names other hosts."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


async def answers(address: str, gateway: str | None = None) -> bool:
    """Return whether a GET is answered with 200, by the gateway of that name if given."""

    def get() -> bool:
        try:
            with open_directly(
                address,
                timeout_s=2.0,
                context=_any_certificate() if address.startswith("https:") else None,
            ) as answer:
                return gateway is None or json.loads(answer.read()).get("gateway_id") == gateway
        except (OSError, urllib.error.URLError, ValueError):
            return False

    return await asyncio.to_thread(get)


def port_of(address: str) -> int:
    """Return the port of a URL."""
    port = urlsplit(address).port
    assert port is not None
    return port


def front_url(gateway: GatewayConfig) -> str:
    """Return the URL at which a local client reaches the gateways."""
    address = url(gateway.host, gateway.port)
    return address.replace("http://", "https://", 1) if gateway.certificate_file else address
