"""A gateway that runs batches, on the bus in memory and on a real one, and its worker."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from millrace.runtime.redis.link import RedisLink
from millrace.schemas.config import RedisConfig
from tests.support.batches.batch_system import (
    BatchGateway,
    Connect,
    batch_gateway,
    batch_worker,
    in_memory,
    on_nats,
)
from tests.support.batches.batch_worker import BatchWorker
from tests.support.nats.streams import delete_streams
from tests.support.servers import NatsServer, RedisServer


@pytest.fixture
async def redis(redis_server: RedisServer) -> RedisConfig:
    """A real Redis that holds nothing."""
    config = RedisConfig(url=redis_server.url)
    link = RedisLink(config)
    await link.call("FLUSHALL")
    await link.close()
    return config


@pytest.fixture(params=["memory", "nats"])
def server(request: pytest.FixtureRequest) -> NatsServer | None:
    """Return the nats-server, or None for the in-memory bus."""
    if request.param == "memory":
        return None
    started: NatsServer = request.getfixturevalue("nats_server")
    return started


@pytest.fixture
async def connect(server: NatsServer | None) -> Connect:
    if server is None:
        return in_memory()
    await delete_streams(server)
    return on_nats(server.url)


@pytest.fixture
async def worker(connect: Connect) -> AsyncIterator[BatchWorker]:
    async with batch_worker(connect) as made:
        yield made


@pytest.fixture
async def front(connect: Connect, redis: RedisConfig) -> AsyncIterator[BatchGateway]:
    async with batch_gateway(connect, redis) as made:
        yield made
