"""Requests that came by a proxy: whom they are from, and that none of them is near."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from millrace.bus.tenancy.tenants import TenantStore
from millrace.gateway.transport.http import Event, Receive, Scope, Send
from millrace.gateway.transport.origins import ProxyReader, is_forwarded
from millrace.runtime.redis.link import RedisLink
from millrace.runtime.settings import load_config
from millrace.schemas.config import GatewayConfig, RedisConfig
from millrace.schemas.errors import ConfigError
from millrace.schemas.websocket import SUBPROTOCOL
from tests.gateway.tenancy.test_access import make_key
from tests.support.running_gateway import RunningGateway, running_gateway
from tests.support.servers import RedisServer


@pytest.fixture
async def redis(redis_server: RedisServer) -> RedisConfig:
    client = Redis.from_url(redis_server.url)
    await client.flushall()
    await client.aclose()
    return RedisConfig(url=f"{redis_server.url}/0")


_CHAT = {"model": "echo", "messages": [{"role": "user", "content": "Hello!"}]}
_TRUSTING = GatewayConfig(trusted_proxies=("127.0.0.1", "10.0.0.0/8", "2001:db8::/32"))


async def seen(
    config: GatewayConfig, peer: str, *headers: tuple[str, str], kind: str = "http"
) -> Scope:
    """The scope of a request as the application gets it."""
    found: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        found.append(scope)

    async def receive() -> Event:
        raise AssertionError

    async def send(event: Event) -> None:
        raise AssertionError

    scope: Scope = {
        "type": kind,
        "client": (peer, 4711),
        "scheme": "http" if kind == "http" else "ws",
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers],
    }
    await ProxyReader(app, config)(scope, receive, send)
    return found[0]


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        ("127.0.0.1", "203.0.113.7", "203.0.113.7"),
        ("10.1.2.3", "203.0.113.7:55123", "203.0.113.7"),
        ("10.1.2.3", "[2001:dead::1]:443", "2001:dead::1"),
        ("::ffff:10.1.2.3", "203.0.113.7", "203.0.113.7"),
        # What the caller wrote itself comes first, and is not believed.
        ("127.0.0.1", "1.1.1.1, 203.0.113.7", "203.0.113.7"),
        ("127.0.0.1", "1.1.1.1, 203.0.113.7, 10.9.9.9", "203.0.113.7"),
        ("127.0.0.1", "1.1.1.1, rubbish, 10.9.9.9", "10.9.9.9"),
        ("127.0.0.1", "unknown", "127.0.0.1"),
        ("127.0.0.1", "10.0.0.1, 10.0.0.2", "10.0.0.1"),
        # The sender is no trusted proxy.
        ("203.0.113.9", "198.51.100.1", "203.0.113.9"),
    ],
)
async def test_the_address_is_the_last_that_a_trusted_proxy_saw(
    peer: str, forwarded: str, client: str
) -> None:
    scope = await seen(_TRUSTING, peer, ("X-Forwarded-For", forwarded))
    assert scope["client"][0] == client
    assert is_forwarded(scope)
    split = [("X-Forwarded-For", part) for part in forwarded.split(", ")]
    assert (await seen(_TRUSTING, peer, *split))["client"][0] == client


async def test_the_scheme_is_what_a_trusted_proxy_says() -> None:
    https = ("X-Forwarded-Proto", "https")
    assert (await seen(_TRUSTING, "127.0.0.1", https))["scheme"] == "https"
    assert (await seen(_TRUSTING, "127.0.0.1", https, kind="websocket"))["scheme"] == "wss"
    assert (await seen(_TRUSTING, "203.0.113.9", https))["scheme"] == "http"
    assert (await seen(GatewayConfig(), "127.0.0.1", https))["scheme"] == "http"
    twice = ("X-Forwarded-Proto", "https, http")
    assert (await seen(_TRUSTING, "127.0.0.1", twice))["scheme"] == "http"
    odd = ("X-Forwarded-Proto", "gopher")
    assert (await seen(_TRUSTING, "127.0.0.1", odd))["scheme"] == "http"


async def test_whatever_a_proxy_adds_shows_that_there_is_one() -> None:
    plain = GatewayConfig()
    assert not is_forwarded(await seen(plain, "127.0.0.1", ("Host", "localhost")))
    for name in ("X-Forwarded-For", "Forwarded", "Via", "X-Real-IP", "X-Forwarded-Host"):
        assert is_forwarded(await seen(plain, "127.0.0.1", (name, "1.2.3.4"))), name
    # A proxy without headers is known by its address, if that is configured.
    assert is_forwarded(await seen(_TRUSTING, "127.0.0.1"))
    assert not is_forwarded(await seen(_TRUSTING, "192.168.0.9"))


async def test_a_proxy_on_this_machine_lets_nobody_in_without_a_key(redis: RedisConfig) -> None:
    link = RedisLink(redis)
    key = {"Authorization": f"Bearer {await make_key(TenantStore(link), 'acme')}"}
    from_afar = {"X-Forwarded-For": "203.0.113.7", "Host": "chat.example"}
    async with (
        running_gateway(GatewayConfig(), redis=redis) as front,
        httpx.AsyncClient(base_url=front.url, timeout=20) as http,
    ):
        assert (await http.get("/v1/models")).status_code == 200
        for path in ("/v1/models", "/v1/limits", "/ops/api/totals"):
            refused = await http.get(path, headers=from_afar)
            assert refused.status_code == 401, path
            assert refused.json()["error"]["code"] == "invalid_api_key"
        assert (await http.get("/metrics")).status_code == 200
        assert (await http.get("/metrics", headers=from_afar)).status_code == 401
        chat = "/v1/chat/completions"
        assert (await http.post(chat, json=_CHAT, headers=from_afar)).status_code == 401
        answer = await http.post(chat, json=_CHAT, headers={**from_afar, **key})
        assert answer.status_code == 200, answer.text
        assert front.worker.jobs[-1].tenant == "acme"
        # The page's own key still opens the page's own socket.
        async with _socket(front, from_afar) as socket:
            await socket.send(json.dumps({"type": "generate", "id": "g", "model": "echo"}))
            message = json.loads(await socket.recv())
            assert (message["type"], message["code"]) == ("error", "invalid_api_key")
        async with _socket(front, from_afar) as socket:
            await socket.send(json.dumps({"type": "authenticate", "token": "anything"}))
            assert json.loads(await socket.recv())["code"] == "invalid_api_key"
    await link.close()


async def test_who_wants_no_keys_at_all_has_no_operator_by_proxy() -> None:
    async with (
        running_gateway(GatewayConfig(auth="none")) as front,
        httpx.AsyncClient(base_url=front.url, timeout=20) as http,
    ):
        forwarded = {"X-Forwarded-For": "203.0.113.7"}
        assert (await http.get("/v1/models", headers=forwarded)).status_code == 200
        refused = await http.get("/ops/api/totals", headers=forwarded)
        assert refused.json()["error"]["code"] == "insufficient_permissions"


async def test_sockets_are_counted_by_the_address_that_a_trusted_proxy_saw() -> None:
    config = GatewayConfig(auth="none", trusted_proxies=("127.0.0.1",), max_sockets_per_address=1)
    async with running_gateway(config) as front:
        one, other = ({"X-Forwarded-For": address} for address in ("203.0.113.1", "203.0.113.2"))
        async with _socket(front, one), _socket(front, other):
            with pytest.raises(InvalidStatus) as refused:
                async with _socket(front, one):
                    pass
            assert refused.value.response.status_code == 429
            # The caller's own entries before the address do not matter.
            with pytest.raises(InvalidStatus):
                async with _socket(front, {"X-Forwarded-For": "9.9.9.9, 203.0.113.1"}):
                    pass


async def test_sockets_of_one_address_that_lies_are_counted_as_one() -> None:
    config = GatewayConfig(auth="none", max_sockets_per_address=1)
    async with (
        running_gateway(config) as front,
        _socket(front, {"X-Forwarded-For": "203.0.113.1"}),
    ):
        with pytest.raises(InvalidStatus):
            async with _socket(front, {"X-Forwarded-For": "203.0.113.2"}):
                pass


def _socket(front: RunningGateway, headers: dict[str, str]) -> Any:
    headers = {name: value for name, value in headers.items() if name != "Host"}
    return connect(
        front.ws_url,
        subprotocols=[SUBPROTOCOL],  # type: ignore[list-item]
        additional_headers=headers,
    )


def test_networks_that_are_none_are_named() -> None:
    for value in ("10.0.0.0/33", "proxy.example"):
        with pytest.raises(ConfigError, match=r"gateway\.trusted_proxies"):
            load_config(None, {"MILLRACE_GATEWAY__TRUSTED_PROXIES": value})
    given = {"MILLRACE_GATEWAY__TRUSTED_PROXIES": "127.0.0.1, 10.0.0.0/8"}
    assert load_config(None, given).gateway.trusted_proxies == ("127.0.0.1", "10.0.0.0/8")
