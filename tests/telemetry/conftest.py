"""Embedded store, one per pytest process (a process has one path), emptied for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser

from millrace.schemas.config import ClickHouseConfig, KafkaConfig
from millrace.telemetry.kafka.embedded import EmbeddedKafka
from millrace.telemetry.store.embedded_engine import connect
from millrace.telemetry.store.migrate import migrate
from millrace.telemetry.store.store import Store
from tests.support.servers import NatsServer
from tests.telemetry.ops_page import OpsPage, serving
from tests.telemetry.stores import empty


@pytest.fixture(scope="session")
def store_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("clickhouse")
    # A connection that stays keeps the engine up between the tests: starting it takes its time.
    held = connect(str(path), "millrace", "older")
    yield path
    held.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def opened_store(store_path: Path) -> AsyncIterator[Store]:
    """The store of this process, with all its tables."""
    opened = await Store.open(ClickHouseConfig(path=str(store_path)))
    await migrate(opened)
    yield opened
    await opened.close()


@pytest.fixture
async def store(opened_store: Store) -> Store:
    """The store of this process, without rows."""
    await empty(opened_store)
    return opened_store


@pytest_asyncio.fixture(loop_scope="module")
async def ops(store: Store, browser: Browser) -> AsyncIterator[OpsPage]:
    """The operations page over the store."""
    async with serving(store, browser) as made:
        yield made


@pytest.fixture
def embedded_kafka() -> Iterator[KafkaConfig]:
    cluster = EmbeddedKafka()
    yield KafkaConfig(bootstrap_servers=cluster.bootstrap_servers)
    cluster.close()


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path / "nats")
    server.start()
    yield server
    server.stop()
