"""Requests that others passed on: from whom they really come, and that nobody is near by proxy."""

from __future__ import annotations

import ipaddress

from millrace.gateway.transport.http import AsgiApp, Receive, Scope, Send
from millrace.runtime.connection_settings import parse_networks
from millrace.schemas.config import GatewayConfig

_FORWARDED = "millrace.forwarded"
# What proxies add. One of them is enough to know that a request is not its sender's own.
_HEADERS = frozenset(
    {
        b"forwarded",
        b"via",
        b"x-forwarded-for",
        b"x-forwarded-host",
        b"x-forwarded-proto",
        b"x-real-ip",
        b"cf-connecting-ip",
        b"true-client-ip",
    }
)
_SCHEMES = {
    "http": {"http": "http", "https": "https"},
    "websocket": {"http": "ws", "https": "wss"},
}

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def is_forwarded(scope: Scope) -> bool:
    """Whether a proxy passed the request on: it may come from anywhere, wherever the proxy is."""
    return bool(scope.get(_FORWARDED))


class ProxyReader:
    """Tells the application the address and scheme that a trusted proxy saw.

    ``X-Forwarded-For`` and ``X-Forwarded-Proto`` of anybody else are not believed. That there is
    such a header is: see ``is_forwarded``.
    """

    def __init__(self, app: AsgiApp, config: GatewayConfig) -> None:
        self._app = app
        self._trusted = parse_networks("gateway.trusted_proxies", config.trusted_proxies)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            self._note(scope)
        await self._app(scope, receive, send)

    def _note(self, scope: Scope) -> None:
        headers = scope["headers"]
        scope[_FORWARDED] = any(name in _HEADERS for name, _ in headers)
        if not self._trusted:
            return
        peer = _address((scope.get("client") or ("",))[0])
        if peer is None or not self._trusts(peer):
            return
        scope[_FORWARDED] = True
        said = ",".join(
            str(value, "latin-1") for name, value in headers if name == b"x-forwarded-for"
        )
        scope["client"] = (str(self._client(peer, said)), 0)
        schemes = [str(value, "latin-1") for name, value in headers if name == b"x-forwarded-proto"]
        if schemes:
            # Of several the last is the one that our own proxy wrote.
            scheme = schemes[-1].rpartition(",")[2].strip().lower()
            scope["scheme"] = _SCHEMES[scope["type"]].get(scheme, scope["scheme"])

    def _client(self, peer: _Address, said: str) -> _Address:
        """The last address before those of trusted proxies; what is before it anybody may have
        written."""
        client = peer
        for hop in reversed(said.split(",")):
            address = _address(hop.strip())
            if address is None:
                break
            client = address
            if not self._trusts(address):
                break
        return client

    def _trusts(self, address: _Address) -> bool:
        return any(address in network for network in self._trusted)


def _address(text: str) -> _Address | None:
    """An address, as proxies write it: perhaps with a port."""
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = getattr(address, "ipv4_mapped", None)
    return mapped or address
