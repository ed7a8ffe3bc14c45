"""A gateway over the in-memory bus for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import openai
import pytest
from redis import Redis

from tests.support.running_gateway import RunningGateway, running_gateway
from tests.support.servers import RedisServer


@pytest.fixture(autouse=True)
def clean_redis(request: pytest.FixtureRequest) -> None:
    """Empty the shared redis-server before each test."""
    if "redis_server" not in request.fixturenames:
        return
    server: RedisServer = request.getfixturevalue("redis_server")
    with Redis.from_url(server.url) as client:
        client.flushall()


@pytest.fixture
async def front() -> AsyncIterator[RunningGateway]:
    async with running_gateway() as running:
        yield running


@pytest.fixture
async def http(front: RunningGateway) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=front.url, timeout=10) as client:
        yield client


@pytest.fixture
async def client(front: RunningGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{front.url}/v1", api_key="none", max_retries=0, timeout=10
    ) as made:
        yield made
