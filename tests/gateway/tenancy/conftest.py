"""Limits in a Redis that holds nothing when a test starts."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from tests.support.limit_bench import LimitBench
from tests.support.servers import RedisServer


@pytest.fixture
async def bench(redis_server: RedisServer) -> AsyncIterator[LimitBench]:
    client = Redis.from_url(redis_server.url)
    await client.flushall()
    await client.aclose()
    made = LimitBench(redis_server.url)
    yield made
    await made.close()
