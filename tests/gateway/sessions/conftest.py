"""Gateways over the same, empty Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from millrace.gateway.sessions.summaries import Generate
from millrace.registry.catalogue import load_catalogue
from millrace.registry.served import ServedModel
from millrace.runtime.clock import Clock
from millrace.schemas.config import GatewayConfig
from tests.gateway.sessions.fronts import MODEL, Front, Make, no_summary
from tests.support.servers import RedisServer


@pytest.fixture(scope="module")
def model() -> ServedModel:
    return ServedModel.load(load_catalogue(""), MODEL)


@pytest.fixture
async def redis(redis_server: RedisServer) -> AsyncIterator[Redis]:
    client = Redis.from_url(redis_server.url)
    await client.flushall()
    yield client
    await client.aclose()


@pytest.fixture
async def make(redis: Redis, redis_server: RedisServer, model: ServedModel) -> AsyncIterator[Make]:
    """Gateways over the same, empty Redis."""
    made: list[Front] = []

    def one(
        config: GatewayConfig | None = None,
        clock: Clock | None = None,
        generate: Generate = no_summary,
    ) -> Front:
        made.append(Front(redis_server.url, model, config, clock, generate))
        return made[-1]

    yield one
    for front in made:
        await front.close()


@pytest.fixture
def front(make: Make) -> Front:
    return make()
