"""Network addresses: loopback, and access without a proxy.

The shell's proxy variables (``HTTP_PROXY``, ``ALL_PROXY`` …) are for the internet, not for the
parts of a system and the servers behind it. Model hubs, object stores and a trace collector may be
on the internet: their libraries follow the variables, but never for loopback addresses.
"""

from __future__ import annotations

import ipaddress
import os
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import ssl
    import urllib.request
    from http.client import HTTPResponse

_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def is_loopback(host: str) -> bool:
    """Return whether a host is loopback, so only this machine can reach it."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def open_directly(
    request: str | urllib.request.Request,
    *,
    timeout_s: float,
    context: ssl.SSLContext | None = None,
) -> HTTPResponse:
    """Open a URL of a configured HTTP server without a proxy.

    ``context`` is for HTTPS. Raises the errors of ``urllib.request.urlopen``.
    """
    import urllib.request

    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if context is not None:
        handlers.append(urllib.request.HTTPSHandler(context=context))
    opener = urllib.request.build_opener(*handlers)  # noqa: TID251 (without proxies)
    return cast("HTTPResponse", opener.open(request, timeout=timeout_s))


def exempt_loopback() -> None:
    """Exempt loopback addresses from the proxy variables, for this process's libraries."""
    for name in ("no_proxy", "NO_PROXY"):
        exempt = [host.strip() for host in os.environ.get(name, "").split(",") if host.strip()]
        if "*" not in exempt:
            os.environ[name] = ",".join(dict.fromkeys([*exempt, *_LOOPBACK]))
