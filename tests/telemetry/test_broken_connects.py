"""Errors of the connections to Kafka and ClickHouse that their libraries do not document."""

from __future__ import annotations

import socket
from typing import Any

import clickhouse_connect
import pytest
from aiokafka.conn import AIOKafkaConnection
from aiokafka.errors import KafkaConnectionError

from millrace.schemas.config import ClickHouseConfig, KafkaConfig
from millrace.telemetry.kafka.kafka import ensure_topics, make_producer
from millrace.telemetry.store.store import Store, StoreUnavailableError
from tests.support.links.broken_connects import each_broken, raising
from tests.support.servers import free_port


@each_broken
async def test_kafka_clients_survive_broken_connects(
    embedded_kafka: KafkaConfig, monkeypatch: pytest.MonkeyPatch, broken: BaseException
) -> None:
    producer = make_producer(embedded_kafka)
    with monkeypatch.context() as patched:
        patched.setattr(AIOKafkaConnection, "connect", raising(broken))
        with pytest.raises(KafkaConnectionError):
            await ensure_topics(embedded_kafka)
        with pytest.raises(KafkaConnectionError):
            await producer.start()
    await producer.stop()
    await ensure_topics(embedded_kafka)


async def test_a_broker_whose_machine_is_gone_is_noticed(
    embedded_kafka: KafkaConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    connect = AIOKafkaConnection.connect

    async def note(connection: AIOKafkaConnection) -> Any:
        made.append(connection)
        return await connect(connection)

    monkeypatch.setattr(AIOKafkaConnection, "connect", note)
    producer = make_producer(embedded_kafka)
    await producer.start()
    (writer,) = {one._writer for one in made} - {None}
    told = writer.get_extra_info("socket")
    assert told.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 10_000
    await producer.stop()


@each_broken
async def test_clickhouse_clients_survive_broken_connects(
    monkeypatch: pytest.MonkeyPatch, broken: BaseException
) -> None:
    config = ClickHouseConfig(url=f"http://127.0.0.1:{free_port()}", path="")
    monkeypatch.setattr(clickhouse_connect, "get_client", raising(broken))
    with pytest.raises(StoreUnavailableError):
        await Store.open(config)
