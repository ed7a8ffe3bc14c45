"""Hosts of a network of their own on this machine: namespaces, each with one link to a bridge."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

import pytest

from tests.support.servers import die_with_parent

# One of 250 networks, so that two runs on one machine do not meet.
_NETWORK = f"10.77.{os.getpid() % 250}"
_OUTSIDE = f"{_NETWORK}.254"
_NOWHERE = "02:00:00:00:00:99"


class NoNetworkError(Exception):
    """Namespaces cannot be made here: that takes root and ``ip``. The message names the failure."""


class Network:
    """Hosts ``1`` to ``num_hosts`` for as long as its ``with`` block lasts; this process is outside
    of them, on the bridge."""

    def __init__(self, num_hosts: int) -> None:
        self._hosts = range(1, num_hosts + 1)
        self._tag = f"mr{os.getpid() % 100_000}"
        self._processes: list[subprocess.Popen[bytes]] = []

    outside = _OUTSIDE

    @staticmethod
    def address(host: int) -> str:
        return f"{_NETWORK}.{host}"

    def __enter__(self) -> Self:
        try:
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("address", "add", f"{_OUTSIDE}/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
            for host in self._hosts:
                self._add(host)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        self._remove()

    def start(self, host: int, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        """Run a command on a host until the block ends."""
        with log.open("ab") as file:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self._name(host), *command],
                stdout=file,
                stderr=file,
                stdin=subprocess.DEVNULL,
                preexec_fn=die_with_parent,
            )
        self._processes.append(process)
        return process

    def set_link(self, host: int, *, up: bool) -> None:
        """Set the link of a host; while it is down, its packets are lost silently."""
        _ip("link", "set", self._port(host), "up" if up else "down")

    def part(self, one: int, other: int) -> None:
        """Drop the packets between two hosts silently until ``join``."""
        for at, to in ((one, other), (other, one)):
            arguments = (self.address(to), "lladdr", _NOWHERE, "dev", "eth0", "nud", "permanent")
            _ip("-n", self._name(at), "neighbour", "replace", *arguments)

    def join(self, one: int, other: int) -> None:
        for at, to in ((one, other), (other, one)):
            _ip("-n", self._name(at), "neighbour", "del", self.address(to), "dev", "eth0")

    def _add(self, host: int) -> None:
        name, port = self._name(host), self._port(host)
        _ip("netns", "add", name)
        _ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("link", "set", port, "master", self._bridge, "up")
        _ip("-n", name, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", name, "link", "set", device, "up")

    def _remove(self) -> None:
        for host in self._hosts:
            subprocess.run(
                ["ip", "netns", "del", self._name(host)], capture_output=True, check=False
            )
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True, check=False)

    @property
    def _bridge(self) -> str:
        return f"{self._tag}b"

    def _name(self, host: int) -> str:
        return f"{self._tag}h{host}"

    def _port(self, host: int) -> str:
        return f"{self._tag}p{host}"


@contextlib.contextmanager
def made_network(num_hosts: int) -> Iterator[Network]:
    """Make a network for a test, which is skipped where no network can be made."""
    with contextlib.ExitStack() as stack:
        try:
            network = stack.enter_context(Network(num_hosts))
        except NoNetworkError as error:
            pytest.skip(f"no network of its own: {error}")
        yield network


def _ip(*arguments: str) -> None:
    """Raises NoNetworkError."""
    try:
        subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True)
    except FileNotFoundError as error:
        raise NoNetworkError("there is no ip here (Debian's package iproute2)") from error
    except subprocess.CalledProcessError as error:
        raise NoNetworkError(f"ip {' '.join(arguments)}: {error.stderr.strip()}") from error


def _try_ip(*arguments: str) -> None:
    """Run ``ip`` and ignore its failure: the object may be gone already."""
    with contextlib.suppress(NoNetworkError):
        _ip(*arguments)
