"""One embedded store for each pytest process (a process has one path), emptied for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from millrace.schemas.config import KafkaConfig
from millrace.telemetry.kafka.embedded import EmbeddedKafka
from millrace.telemetry.store.embedded_engine import connect
from millrace.telemetry.store.store import Store
from tests.support.servers import NatsServer
from tests.telemetry.stores import empty_store


@pytest.fixture(scope="session")
def store_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("clickhouse")
    # A connection that stays keeps the engine up between the tests: starting it takes its time.
    held = connect(str(path), "millrace", "older")
    yield path
    held.close()


@pytest.fixture
async def store(store_path: Path) -> AsyncIterator[Store]:
    async with empty_store(store_path) as opened:
        yield opened


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
