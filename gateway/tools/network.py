"""Connections of tools, to checked addresses only."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import httpcore

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address

# Addresses where clouds hand out credentials, beyond the link-local ones.
_METADATA = frozenset(
    ipaddress.ip_address(text) for text in ("fd00:ec2::254", "100.100.100.200", "192.0.0.192")
)
# Blocks of IPv6 whose last 32 bits are an IPv4 address.
_EMBEDDING = tuple(ipaddress.ip_network(text) for text in ("::/96", "64:ff9b::/96"))


class ForbiddenAddressError(Exception):
    """Name with an address that tools must not connect to."""


async def resolve(host: str, port: int) -> Sequence[str]:
    """Resolve a host to its addresses. Raises OSError."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_allowed(address: str, *, allow_private: bool) -> bool:
    """Return whether tools may connect to an IP address: a public one, or also a private or
    loopback one. Link-local, multicast and reserved addresses, and addresses that hand out
    credentials, are never allowed.
    """
    ip = _innermost(ipaddress.ip_address(address))
    if ip in _METADATA or ip.is_link_local or ip.is_multicast or ip.is_unspecified:
        return False
    if allow_private and (ip.is_private or ip.is_loopback):
        return True
    return ip.is_global and not ip.is_reserved


def _innermost(ip: _Address) -> _Address:
    """Return the IPv4 address within an IPv6 address, if there is one."""
    if isinstance(ip, ipaddress.IPv4Address) or ip.is_loopback or ip.is_unspecified:
        return ip
    if ip.teredo is not None:
        return ip.teredo[1]
    within = ip.ipv4_mapped or ip.sixtofour
    if within is None and any(ip in network for network in _EMBEDDING):
        within = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    return ip if within is None else within


class CheckedNetwork(httpcore.AsyncNetworkBackend):
    """Network that resolves a host once for each connection, checks every address, and connects to
    just these, so that a changed DNS answer has no effect. ``private_host`` and port may be on a
    private network; None: no host may.
    """

    def __init__(self, resolve: Resolve, private_host: tuple[str, int] | None) -> None:
        self._resolve = resolve
        self._private_host = private_host
        self._inner = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect to a host. Raises ForbiddenAddressError if any of the host's addresses is
        forbidden.
        """
        addresses = await self._resolve(host, port)
        allow_private = (host, port) == self._private_host
        if not all(is_allowed(address, allow_private=allow_private) for address in addresses):
            raise ForbiddenAddressError(f"{host} is on a network that tools may not reach")
        failure: Exception = httpcore.ConnectError(f"{host} has no address")
        for address in addresses:
            try:
                return await self._inner.connect_tcp(
                    address, port, timeout, local_address, socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        raise failure
