"""The same path over Apache Kafka: several partitions, a real group, a broker that dies."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from bus.memory import MemoryBroker, MemoryBus
from schemas.config import KafkaConfig
from telemetry.store import Store
from tests.support.kafka import KafkaBroker, missing_tool
from tests.support.waiting import eventually
from tests.telemetry.pipeline import count, running
from tests.telemetry.records import request_record

pytestmark = [
    pytest.mark.kafka,
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(missing_tool() is not None, reason=f"{missing_tool()} is not installed"),
]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    started = KafkaBroker(tmp_path_factory.mktemp("kafka"))
    started.start()
    yield started
    started.stop()


def config_of(broker: KafkaBroker, group: str) -> KafkaConfig:
    return KafkaConfig(bootstrap_servers=broker.bootstrap_servers, group=group)


async def publish(bus: MemoryBus, first: int, last: int, seed: int) -> None:
    for number in range(first, last):
        await bus.outbox.publish(request_record(number, seed=seed))


async def landed(store: Store, seed: int, num_records: int) -> None:
    """Every request of this seed is there, once, under every way of counting."""
    mine = f"startsWith(request_id, 'req-{seed}-')"

    async def complete() -> bool:
        return await count(store, f"requests WHERE {mine}") == num_records

    await eventually(complete, timeout_s=30, what=f"{num_records} requests")
    assert await count(store, f"requests_once WHERE {mine}") == num_records


async def test_five_hundred_records_land_once(store: Store, broker: KafkaBroker) -> None:
    bus = MemoryBus(MemoryBroker())
    await publish(bus, 0, 500, seed=1)
    async with running(bus, store, config_of(broker, "first")):
        await landed(store, 1, 500)
    raw = await store.rows("SELECT count() FROM requests")
    assert raw == [(500,)]


async def test_a_restart_goes_on_where_the_group_was(store: Store, broker: KafkaBroker) -> None:
    bus = MemoryBus(MemoryBroker())
    await publish(bus, 0, 50, seed=2)
    async with running(bus, store, config_of(broker, "second")):
        await landed(store, 2, 50)
    before = bus.broker.outbox.last_sequence
    await publish(bus, 50, 100, seed=2)
    async with running(bus, store, config_of(broker, "second")) as service:
        await landed(store, 2, 100)
        assert service.sink.num_stored <= 60, "a durable Kafka is not filled again from the outbox"
    assert before == 50


async def test_a_broker_that_is_killed_and_comes_back(store: Store, broker: KafkaBroker) -> None:
    bus = MemoryBus(MemoryBroker())
    await publish(bus, 0, 100, seed=3)
    async with running(bus, store, config_of(broker, "third")):
        await landed(store, 3, 100)
        broker.kill()
        await publish(bus, 100, 300, seed=3)
        # In this thread: a server dies with the thread that started it.
        broker.start()
        await landed(store, 3, 300)


async def test_two_sinks_share_the_partitions_and_one_leaves(
    store: Store, broker: KafkaBroker
) -> None:
    bus = MemoryBus(MemoryBroker())
    kafka = config_of(broker, "fourth")
    async with running(bus, store, kafka) as first:
        await publish(bus, 0, 200, seed=4)
        async with running(MemoryBus(bus.broker), store, kafka) as second:
            for start in range(200, 2_000, 100):
                await publish(bus, start, start + 100, seed=4)
                await asyncio.sleep(0.05)

            async def both_work() -> bool:
                await publish(bus, 2_000, 2_001, seed=4)
                return first.sink.num_stored > 0 and second.sink.num_stored > 0

            await eventually(both_work, timeout_s=20)
            await publish(bus, 2_001, 2_300, seed=4)
        await publish(bus, 2_300, 2_500, seed=4)
        await landed(store, 4, 2_500)
