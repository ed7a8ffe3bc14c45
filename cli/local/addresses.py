"""Addresses of the parts of a local system, and whether something answers there."""

from __future__ import annotations

import asyncio
import json
import ssl
import urllib.error
from urllib.parse import urlsplit

from millrace.cli.endpoints import LOOPBACK, url
from millrace.runtime.addresses import open_directly
from millrace.schemas.config import GatewayConfig


async def listens(port: int) -> bool:
    """Whether a server of this machine listens there."""
    try:
        _reader, writer = await asyncio.open_connection(LOOPBACK, port)
    except OSError:
        return False
    writer.close()
    return True


def _any_certificate() -> ssl.SSLContext:
    """Nothing is told to our own parts: whether the certificate suits the name by which others know
    this machine is not asked here."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


async def answers(address: str, gateway: str | None = None) -> bool:
    """Whether a GET says 200, and the gateway of that name said it."""

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
    """The port in a URL."""
    port = urlsplit(address).port
    assert port is not None
    return port


def front_url(gateway: GatewayConfig) -> str:
    """Where a local client reaches the gateways."""
    address = url(gateway.host, gateway.port)
    return address.replace("http://", "https://", 1) if gateway.certificate_file else address
