"""Models as Anthropic's own client lists them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import anthropic
import httpx
import pytest

from millrace.bus.tenancy.tenants import TenantStore
from millrace.gateway.models import LoadedModels
from millrace.registry.routing.router import Route, Router
from millrace.runtime.redis.link import RedisLink
from millrace.schemas.config import GatewayConfig, RedisConfig
from millrace.schemas.models.cards import ModelCard
from millrace.schemas.tenants import LimitOverrides
from tests.support.running_gateway import MODEL, ByteModel, RunningGateway, running_gateway
from tests.support.servers import RedisServer

_CREATED = 1_700_000_000
_NUM_MODELS = 23
_NAMES = [f"model-{number}" for number in range(_NUM_MODELS)]
_VERSION = {"anthropic-version": "2023-06-01"}


@pytest.fixture
async def front() -> AsyncIterator[RunningGateway]:
    cards = {name: ModelCard(id=name, created=_CREATED, max_model_len=256) for name in _NAMES}
    async with running_gateway(models=LoadedModels(cards, lambda _name: ByteModel())) as running:
        yield running


async def test_all_pages_of_the_list(sdk: anthropic.AsyncAnthropic) -> None:
    page = await sdk.models.list()
    assert (page.has_more, page.first_id, page.last_id) == (True, "model-0", "model-19")
    assert [one.id async for one in page] == _NAMES
    first = page.data[0]
    assert (first.type, first.display_name, first.lifecycle) == ("model", "model-0", "active")
    assert first.created_at == datetime.fromtimestamp(_CREATED, UTC)
    assert (first.max_input_tokens, first.max_tokens) == (256, 256)
    assert len([one async for one in sdk.models.list(limit=5)]) == _NUM_MODELS
    assert len((await sdk.models.list(limit=1_000)).data) == _NUM_MODELS


async def test_pages_before_a_model(sdk: anthropic.AsyncAnthropic) -> None:
    page = await sdk.models.list(before_id="model-7", limit=3)
    assert [one.id for one in page.data] == ["model-4", "model-5", "model-6"]
    assert page.has_more
    whole = await sdk.models.list(before_id="model-2", limit=3)
    assert [one.id for one in whole.data] == ["model-0", "model-1"]
    assert not whole.has_more
    last = await sdk.models.list(after_id="model-22")
    assert (last.data, last.first_id, last.has_more) == ([], None, False)
    assert (await sdk.models.list(lifecycle=["retired"])).data == []


async def test_one_model(sdk: anthropic.AsyncAnthropic, http: httpx.AsyncClient) -> None:
    found = await sdk.models.retrieve("model-3")
    assert (found.id, found.type) == ("model-3", "model")
    shown = (await http.get("/v1/models/model-3", headers=_VERSION)).json()
    assert shown == {
        "id": "model-3",
        "display_name": "model-3",
        "created_at": "2023-11-14T22:13:20Z",
        "max_input_tokens": 256,
        "max_tokens": 256,
        "type": "model",
        "lifecycle": "active",
        "capabilities": None,
        "deprecated_at": None,
        "line": None,
        "retires_at": None,
    }
    in_openais_form = (await http.get("/v1/models/model-3")).json()
    assert (in_openais_form["object"], in_openais_form["created"]) == ("model", _CREATED)


@pytest.mark.parametrize(
    ("method", "path", "status", "kind", "param"),
    [
        ("GET", "/v1/models/none", 404, "not_found_error", "model"),
        ("GET", "/v1/models?limit=0", 400, "invalid_request_error", "limit"),
        ("GET", "/v1/models?limit=1001", 400, "invalid_request_error", "limit"),
        ("GET", "/v1/models?after_id=none", 400, "invalid_request_error", "after_id"),
        ("GET", "/v1/models?after_id=a&before_id=b", 400, "invalid_request_error", "before_id"),
        ("DELETE", "/v1/models", 405, "invalid_request_error", None),
        ("POST", "/v1/complete", 404, "not_found_error", None),
    ],
)
async def test_errors_have_anthropics_shape(
    http: httpx.AsyncClient, method: str, path: str, status: int, kind: str, param: str | None
) -> None:
    answer = await http.request(method, path, headers=_VERSION)
    body: Any = answer.json()
    assert (answer.status_code, body["type"]) == (status, "error")
    assert (body["error"]["type"], body["error"]["param"]) == (kind, param)
    assert answer.headers["request-id"]
    plain = (await http.request(method, path)).json()
    assert "type" not in plain


async def test_routes_are_listed() -> None:
    cards = {name: ModelCard(id=name, created=_CREATED, max_model_len=256) for name in _NAMES[:2]}
    router = Router({"auto-1": Route(small="model-0", large="model-1")})
    models = LoadedModels(cards, lambda _name: ByteModel(), router)
    async with (
        running_gateway(models=models) as front,
        anthropic.AsyncAnthropic(base_url=front.url, api_key="none", max_retries=0) as sdk,
    ):
        assert [one.id async for one in sdk.models.list()] == ["model-0", "model-1", "auto-1"]


async def test_what_the_caller_may_have_of_the_window(redis_server: RedisServer) -> None:
    redis = RedisConfig(url=redis_server.url)
    link = RedisLink(redis)
    _, token = await TenantStore(link).create_key("a", 0, limits=LimitOverrides(context_tokens=99))
    await link.close()
    cards = {MODEL: ModelCard(id=MODEL, created=_CREATED, max_model_len=256)}
    models = LoadedModels(cards, lambda _name: ByteModel())
    async with (
        running_gateway(GatewayConfig(auth="required"), models, redis=redis) as front,
        anthropic.AsyncAnthropic(base_url=front.url, api_key=token) as sdk,
        anthropic.AsyncAnthropic(base_url=front.url, api_key="mr-none") as stranger,
    ):
        assert (await sdk.models.retrieve(MODEL)).max_input_tokens == 99
        with pytest.raises(anthropic.AuthenticationError) as caught:
            await stranger.models.list()
        assert caught.value.type == "authentication_error"
