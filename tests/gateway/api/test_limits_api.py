"""Keys and limits over HTTP: a gateway that demands keys, on a real redis-server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from decimal import Decimal
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from millrace.bus.tenancy.tenants import TenantStore
from millrace.gateway.models import LoadedModels
from millrace.registry.pricing import PriceBook
from millrace.runtime.redis.link import RedisLink
from millrace.schemas.config import GatewayConfig, RedisConfig
from millrace.schemas.jobs import Tier
from millrace.schemas.models.cards import ModelCard
from millrace.schemas.tenants import LimitOverrides, TenantRecord
from tests.support.running_gateway import MODEL, ByteModel, running_gateway
from tests.support.servers import RedisServer
from tests.support.waiting import eventually

CHAT = {"model": MODEL, "max_tokens": 3, "messages": [{"role": "user", "content": "abc"}]}


@pytest.fixture
async def redis_config(redis_server: RedisServer) -> RedisConfig:
    client = Redis.from_url(redis_server.url)
    await client.flushall()
    await client.aclose()
    return RedisConfig(url=redis_server.url)


@pytest.fixture
async def store(redis_config: RedisConfig) -> AsyncIterator[TenantStore]:
    link = RedisLink(redis_config)
    store = TenantStore(link)
    await store.change_tenant("acme", lambda _known: TenantRecord(tier=Tier.PRO))
    yield store
    await link.close()


@pytest.fixture
async def http(redis_config: RedisConfig) -> AsyncIterator[httpx.AsyncClient]:
    config = GatewayConfig(auth="required")
    async with (
        running_gateway(config, redis=redis_config) as running,
        httpx.AsyncClient(base_url=running.url, timeout=10) as client,
    ):
        yield client


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


async def test_without_a_key_nothing_is_answered(http: httpx.AsyncClient) -> None:
    answers = [
        await http.post("/v1/chat/completions", json=CHAT),
        await http.post("/v1/completions", json={"model": MODEL, "prompt": "a"}),
        await http.post("/v1/tokenize", json={"model": MODEL, "prompt": "a"}),
        await http.get("/v1/models"),
        await http.get(f"/v1/models/{MODEL}"),
        await http.get("/v1/limits"),
        await http.get("/v1/limits", headers=bearer("mr-000000000000-0")),
        await http.get("/v1/limits", headers=[(b"x-api-key", b"mr-\xff")]),
        await http.get("/v1/limits?api_key=mr-000000000000-0"),
    ]
    for answer in answers:
        assert answer.status_code == 401, answer.url
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.json()["error"]["type"] == "authentication_error"
        assert answer.headers["www-authenticate"].startswith("Bearer")


async def test_what_a_caller_may_use_and_has_left(
    http: httpx.AsyncClient, store: TenantStore
) -> None:
    record, token = await store.create_key(
        "acme", 0, limits=LimitOverrides(requests_per_minute=2, monthly_budget=Decimal("1.5"))
    )
    answer = await http.post("/v1/chat/completions", json=CHAT, headers=bearer(token))
    assert answer.status_code == 200
    assert answer.headers["x-ratelimit-limit-requests"] == "2"
    assert answer.headers["x-ratelimit-remaining-requests"] == "1"
    assert answer.headers["x-ratelimit-limit-tokens"] == "2000000"
    assert (await http.post("/v1/chat/completions", json=CHAT, headers=bearer(token))).is_success
    refused = await http.post("/v1/chat/completions", json=CHAT, headers=bearer(token))
    assert refused.status_code == 429
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "requests_per_minute")
    assert f"key {record.key_id}" in error["message"]

    async def is_settled() -> bool:
        shown = (await http.get("/v1/limits", headers={"x-api-key": token})).json()
        left: int = shown["accounts"][0]["remaining"]["concurrent_requests"]
        return left == 64

    await eventually(is_settled)
    shown = (await http.get("/v1/limits", headers={"x-api-key": token})).json()
    assert (shown["object"], shown["tenant"], shown["tier"]) == ("limits", "acme", "pro")
    tenant, key = shown["accounts"]
    assert (tenant["kind"], tenant["name"]) == ("tenant", "acme")
    assert tenant["limits"]["requests_per_minute"] == 600
    assert tenant["remaining"]["requests_per_minute"] >= 598
    assert (key["kind"], key["name"]) == ("key", record.key_id)
    assert key["limits"]["monthly_budget"] == "1.5"
    assert key["remaining"]["requests_per_minute"] == 0
    assert key["remaining"]["tokens_per_minute"] is None
    assert key["remaining"]["monthly_budget"] == {"USD": "1.5"}
    assert (key["spent"], key["held"]) == ({"USD": "0"}, {"USD": "0"})
    assert (tenant["remaining"]["monthly_budget"], tenant["spent"]) == (None, {})


class _Euros(ByteModel):
    """A million tokens cost a million EUR."""

    def __init__(self) -> None:
        super().__init__()
        self.prices = PriceBook(
            version="eu",
            currency="EUR",
            input_per_million=Decimal(1_000_000),
            cached_input_per_million=Decimal(1_000_000),
            output_per_million=Decimal(1_000_000),
        )


async def test_a_budget_bounds_its_own_currency(
    redis_config: RedisConfig, store: TenantStore
) -> None:
    models = LoadedModels(
        {MODEL: ModelCard(id=MODEL, created=1_700_000_000, max_model_len=None)},
        lambda _name: _Euros(),
    )
    poor = LimitOverrides(monthly_budget={"EUR": Decimal(1), "USD": Decimal(10**6)})
    _, poor_token = await store.create_key("acme", 0, limits=poor)
    dollars = LimitOverrides(monthly_budget=Decimal(1))
    _, dollars_token = await store.create_key("acme", 0, limits=dollars)
    asks: tuple[tuple[str, dict[str, Any]], ...] = (
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"model": MODEL, "prompt": "abc", "max_tokens": 3}),
        ("/v1/messages", CHAT),
        ("/v1/responses", {"model": MODEL, "input": "abc", "max_output_tokens": 16}),
        ("/v1/embeddings", {"model": MODEL, "input": "abc"}),
    )
    async with (
        running_gateway(GatewayConfig(auth="required"), models, redis=redis_config) as running,
        httpx.AsyncClient(base_url=running.url, timeout=10) as http,
    ):
        for path, body in asks[:-1]:
            refused = await http.post(path, json=body, headers=bearer(poor_token))
            assert refused.status_code == 429, path
            assert "monthly_budget of key" in refused.text
            assert "1 EUR. 0 EUR is spent and the request may cost" in refused.text
            answer = await http.post(path, json=body, headers=bearer(dollars_token))
            assert answer.status_code == 200, path
        path, body = asks[-1]
        refused = await http.post(path, json=body, headers=bearer(poor_token))
        assert (refused.status_code, "1 EUR" in refused.text) == (429, True)

        async def is_settled() -> bool:
            shown = (await http.get("/v1/limits", headers=bearer(dollars_token))).json()
            return all(not float(amount) for amount in shown["accounts"][1]["held"].values())

        await eventually(is_settled)
        shown = (await http.get("/v1/limits", headers=bearer(dollars_token))).json()
    tenant, key = shown["accounts"]
    assert key["remaining"]["monthly_budget"] == {"USD": "1"}
    assert (key["spent"]["USD"], float(key["spent"]["EUR"]) > 0) == ("0", True)
    assert tenant["spent"] == {"EUR": key["spent"]["EUR"]}
    assert tenant["remaining"]["monthly_budget"] is None


async def test_a_streamed_answer_has_the_headers_too(
    http: httpx.AsyncClient, store: TenantStore
) -> None:
    _, token = await store.create_key("acme", 0)
    asked = {**CHAT, "stream": True}
    answer = await http.post("/v1/chat/completions", json=asked, headers=bearer(token))
    assert answer.status_code == 200
    assert answer.headers["x-ratelimit-limit-requests"] == "600"


async def test_a_revoked_key_is_refused_at_once(
    http: httpx.AsyncClient, store: TenantStore
) -> None:
    record, token = await store.create_key("acme", 0)
    assert (await http.post("/v1/chat/completions", json=CHAT, headers=bearer(token))).is_success
    await store.revoke(record.key_id, 1)
    refused = await http.post("/v1/chat/completions", json=CHAT, headers=bearer(token))
    assert refused.status_code == 401
    assert "revoked" in refused.json()["error"]["message"]


async def test_only_an_administrator_sees_other_tenants(
    http: httpx.AsyncClient, store: TenantStore
) -> None:
    _, plain = await store.create_key("acme", 0)
    _, admin = await store.create_key("acme", 0, is_admin=True)
    refused = await http.get("/v1/limits?tenant=other", headers=bearer(plain))
    assert refused.status_code == 403
    assert refused.json()["error"]["code"] == "insufficient_permissions"
    assert (await http.get("/v1/limits?tenant=acme", headers=bearer(plain))).is_success
    shown = (await http.get("/v1/limits?tenant=other", headers=bearer(admin))).json()
    assert (shown["tenant"], shown["tier"]) == ("other", None)
    assert shown["accounts"][0]["limits"]["requests_per_minute"] == 60
    bad = await http.get("/v1/limits?tenant=a%20b", headers=bearer(admin))
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "tenant")


async def test_models_say_what_each_tier_may_have(
    http: httpx.AsyncClient, store: TenantStore
) -> None:
    _, token = await store.create_key("acme", 0)
    card = (await http.get(f"/v1/models/{MODEL}", headers=bearer(token))).json()
    assert card["tier_context_tokens"] == {
        "enterprise": 131_072,
        "pro": 65_536,
        "free": 32_768,
        "batch": 131_072,
    }
    await http.post("/v1/tokenize", json={"model": MODEL, "prompt": "a"}, headers=bearer(token))
    card = (await http.get(f"/v1/models/{MODEL}", headers=bearer(token))).json()
    assert set(card["tier_context_tokens"].values()) == {4_096}
