"""Access to the metrics on a gateway's port."""

from __future__ import annotations

import httpx
import pytest

from millrace.bus.tenancy.tenants import TenantStore
from millrace.runtime.redis.link import RedisLink
from millrace.schemas.config import GatewayConfig, MetricsConfig, RedisConfig
from tests.support.running_gateway import running_gateway
from tests.support.servers import RedisServer

TOKEN = "a-token-of-prometheus"


@pytest.mark.parametrize(
    ("host", "exposure", "opens"),
    [
        ("127.0.0.1", MetricsConfig(), {"nothing", "admin", "tenant", "wrong"}),
        ("127.0.0.1", MetricsConfig(token=TOKEN), {"token", "admin"}),
        ("0.0.0.0", MetricsConfig(), {"admin"}),
        ("0.0.0.0", MetricsConfig(token=TOKEN), {"token", "admin"}),
        ("0.0.0.0", MetricsConfig(public=True), {"nothing", "admin", "tenant", "wrong"}),
    ],
)
async def test_who_may_read_a_gateways_metrics(
    redis_server: RedisServer, host: str, exposure: MetricsConfig, opens: set[str]
) -> None:
    redis = RedisConfig(url=redis_server.url)
    link = RedisLink(redis)
    store = TenantStore(link)
    _, admin = await store.create_key("acme", 0, is_admin=True)
    _, tenant = await store.create_key("acme", 0)
    await link.close()
    bearers = {"nothing": "", "admin": admin, "tenant": tenant, "wrong": "guess", "token": TOKEN}
    config = GatewayConfig(host=host, auth="required")
    async with (
        running_gateway(config, redis=redis, exposure=exposure) as front,
        httpx.AsyncClient(base_url=front.url, timeout=20) as http,
    ):
        for who, bearer in bearers.items():
            if who == "token" and not exposure.token:
                continue
            headers = {"authorization": f"Bearer {bearer}"} if bearer else {}
            answer = await http.get("/metrics", headers=headers)
            assert answer.status_code == (200 if who in opens else 401), who
            assert ("millrace_http_requests" in answer.text) == (who in opens)
            if who not in opens:
                assert answer.json()["error"]["code"] == "metrics_closed"
                assert answer.headers["www-authenticate"].startswith("Bearer")
        assert (await http.get("/healthz")).status_code == 200


async def test_a_token_holds_on_a_gateway_without_keys_too() -> None:
    async with (
        running_gateway(exposure=MetricsConfig(token=TOKEN)) as front,
        httpx.AsyncClient(base_url=front.url, timeout=20) as http,
    ):
        assert (await http.get("/metrics")).status_code == 401
        shown = await http.get("/metrics", headers={"authorization": f"Bearer {TOKEN}"})
        assert shown.status_code == 200
