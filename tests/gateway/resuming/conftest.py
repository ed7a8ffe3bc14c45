"""Two gateways of one system."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from redis.asyncio import Redis

from millrace.schemas.config import RedisConfig
from tests.gateway.resuming.clients import CONFIG, Pair
from tests.support.running_gateway import running_gateway
from tests.support.servers import RedisServer
from tests.support.waiting import eventually


@pytest.fixture
async def redis(redis_server: RedisServer) -> RedisConfig:
    client = Redis.from_url(redis_server.url)
    await client.flushall()
    await client.aclose()
    return RedisConfig(url=f"{redis_server.url}/0")


@pytest.fixture
async def pair(redis: RedisConfig) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(
            running_gateway(CONFIG, gateway_id="gw-1", redis=redis)
        )
        second = await stack.enter_async_context(
            running_gateway(CONFIG, gateway_id="gw-2", redis=redis, broker=first.broker)
        )
        await eventually(lambda: bool(second.gateway.fleet.live_workers()))
        yield Pair(first, second)
