"""Origin of a request: the address behind trusted proxies, and the web page in a browser.

A browser sends a page's requests with its ``Origin``. A foreign page must not be able to use a
gateway that needs no key because only this machine can reach it. Nor may a page that rebound its
DNS name to this machine after it was loaded: its requests come without ``Origin``, for that name.
"""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Callable
from urllib.parse import urlsplit

from millrace.gateway.errors import Refusal, refusal_of
from millrace.gateway.transport.http import (
    JSON,
    AsgiApp,
    Receive,
    Scope,
    Send,
    header_of,
    refuse_handshake,
    with_headers,
)
from millrace.gateway.transport.response_headers import EXPOSED
from millrace.runtime.addresses import is_loopback
from millrace.runtime.connection_settings import parse_networks
from millrace.schemas.config import GatewayConfig
from millrace.schemas.errors import MillraceError

_FORWARDED = "millrace.forwarded"
# Headers that proxies add. Any of them shows that a request was forwarded.
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


_ANY = "*"
_MAX_AGE_S = b"600"
_MAX_ORIGIN_CHARACTERS = 300  # a scheme, a name of 253 characters and a port
_MAX_ASKED_CHARACTERS = 2_000  # of names of headers, which are echoed
_MAX_HOSTS = 64  # size of the cache of parsed hosts
_METHODS = b"GET, POST, DELETE"


def is_forwarded(scope: Scope) -> bool:
    """Return whether a proxy passed the request on: it may come from anywhere, wherever the proxy
    is.
    """
    return bool(scope.get(_FORWARDED))


class ProxyReader:
    """Middleware that sets the client address and scheme that a trusted proxy saw.

    ``X-Forwarded-For`` and ``X-Forwarded-Proto`` of other senders are ignored, but their presence
    is noted: see ``is_forwarded``.
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
            # Of several values, our own proxy wrote the last.
            scheme = schemes[-1].rpartition(",")[2].strip().lower()
            scope["scheme"] = _SCHEMES[scope["type"]].get(scheme, scope["scheme"])

    def _client(self, peer: _Address, said: str) -> _Address:
        """Return the last address before those of trusted proxies; earlier ones may be forged."""
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
    """Parse an address, as proxies write it: perhaps with a port."""
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


class OriginError(MillraceError, code="origin_not_allowed", http_status=403):
    """Request of a page with a disallowed origin."""

    def __init__(self, origin: str) -> None:
        super().__init__(
            f"Pages of {origin:.200} may not use this gateway. Its operator can name them in "
            f"gateway.allowed_origins."
        )


class HostError(MillraceError, code="host_not_allowed", http_status=403):
    """Request for a host name that this machine does not have."""

    def __init__(self, host: str) -> None:
        super().__init__(
            f"This gateway needs no key and serves this machine only, not {host:.200}. Use "
            "localhost, or have its operator list the page's origin in gateway.allowed_origins."
        )


class OriginGuard:
    """Guard that refuses requests of pages that are not allowed, and answers browsers' preflight
    requests. ``on_refused`` is called with each refusal, and returns it in the shape of the path's
    clients.
    """

    def __init__(
        self,
        app: AsgiApp,
        config: GatewayConfig,
        on_refused: Callable[[Scope, Refusal], Refusal],
        demands_key_of: Callable[[Scope], bool],
    ) -> None:
        self._app = app
        self._on_refused = on_refused
        self._demands_key_of = demands_key_of
        self._host = config.host
        self._is_local = is_loopback(config.host)
        self._allowed = frozenset(origin.rstrip("/") for origin in config.allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        origin, host = header_of(scope, b"origin"), header_of(scope, b"host")
        if origin is None and host is not None and not self._is_for_us(host, scope):
            await self._refuse(HostError(host), scope, receive, send)
        elif origin is None or self._is_own(origin, scope):
            await self._app(scope, receive, send)
        elif not self._is_allowed(origin):
            await self._refuse(OriginError(origin), scope, receive, send)
        elif scope["type"] == "http":
            await self._serve_elsewhere(origin, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _refuse(
        self, error: MillraceError, scope: Scope, receive: Receive, send: Send
    ) -> None:
        refusal = self._on_refused(scope, refusal_of(error))
        if scope["type"] == "websocket":
            await receive()
            await refuse_handshake(scope, send, refusal)
            return
        headers = [JSON, *refusal.headers]
        await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
        await send({"type": "http.response.body", "body": refusal.body})

    def _is_own(self, origin: str, scope: Scope) -> bool:
        """Return whether the page came from here: from the host that the request is for.

        Without keys that host has to be an address, or this machine by name: a foreign owner may
        have any other name resolve to this machine.
        """
        try:
            parts = urlsplit(origin)
        except ValueError:
            return False
        if parts.netloc != (header_of(scope, b"host") or ""):
            return False
        return self._demands_key_of(scope) or self._is_here(parts.hostname or "")

    def _is_allowed(self, origin: str) -> bool:
        if _ANY in self._allowed:
            return len(origin) <= _MAX_ORIGIN_CHARACTERS
        return origin in self._allowed

    def _is_for_us(self, host: str, scope: Scope) -> bool:
        """Return whether a request without an origin may be for this host. Names without a dot
        resolve on this machine or its network only, so a foreign owner cannot rebind them.
        """
        is_private = self._is_local and not self._demands_key_of(scope)
        if not is_private or _ANY in self._allowed:
            return True
        if not self._allowed.isdisjoint((f"http://{host}", f"https://{host}")):
            return True
        name = _name_in(host)
        return name is not None and ("." not in name or self._is_here(name))

    def _is_here(self, name: str) -> bool:
        return name in ("localhost", self._host) or _is_address(name)

    async def _serve_elsewhere(
        self, origin: str, scope: Scope, receive: Receive, send: Send
    ) -> None:
        allow = (b"access-control-allow-origin", origin.encode("latin-1"))
        vary = (b"vary", b"origin")
        if scope["method"] == "OPTIONS" and header_of(scope, b"access-control-request-method"):
            asked = header_of(scope, b"access-control-request-headers") or ""
            if len(asked) > _MAX_ASKED_CHARACTERS:
                asked = ""
            headers = [
                allow,
                vary,
                (b"access-control-allow-methods", _METHODS),
                (b"access-control-allow-headers", asked.encode("latin-1")),
                (b"access-control-max-age", _MAX_AGE_S),
                (b"content-length", b"0"),
            ]
            await send({"type": "http.response.start", "status": 204, "headers": headers})
            await send({"type": "http.response.body", "body": b""})
            return

        more = [allow, vary, (b"access-control-expose-headers", EXPOSED)]
        await self._app(scope, receive, with_headers(send, lambda own: [*own, *more]))


@functools.lru_cache(maxsize=_MAX_HOSTS)
def _name_in(host: str) -> str | None:
    """Return the name in a ``Host`` header, without its port; None if it is invalid."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return None


@functools.lru_cache(maxsize=_MAX_HOSTS)
def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
