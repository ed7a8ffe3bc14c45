"""A gateway with Redis, and OpenAI's client of it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from millrace.schemas.config import RedisConfig
from tests.gateway.responses.fronts import transcribing_models
from tests.support.running_gateway import (
    RunningGateway,
    running_gateway,
)
from tests.support.servers import RedisServer


@pytest.fixture
def redis(redis_server: RedisServer) -> RedisConfig:
    return RedisConfig(url=redis_server.url)


@pytest.fixture
async def front(redis: RedisConfig) -> AsyncIterator[RunningGateway]:
    async with running_gateway(models=transcribing_models(), redis=redis) as running:
        yield running
