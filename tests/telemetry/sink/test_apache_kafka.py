"""The same path over Apache Kafka: several partitions, a real group, a broker that dies."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from millrace.bus.memory import MemoryBroker, MemoryBus
from millrace.schemas.config import KafkaConfig
from millrace.telemetry.store.store import Store
from tests.support.kafka import KafkaBroker, missing_tool
from tests.support.waiting import eventually
from tests.telemetry.moody import MoodyStore
from tests.telemetry.pipeline import count, running
from tests.telemetry.records import request_record
from tests.telemetry.stores import POLL_S

pytestmark = [
    pytest.mark.kafka,
    pytest.mark.slow(
        reason="a JVM for 40 s; the same path runs over the embedded Kafka in test_pipeline.py, "
        "test_twice.py and test_crashes.py, and a broker that ends in test_store_full.py"
    ),
    pytest.mark.timeout(240),
    pytest.mark.skipif(missing_tool() is not None, reason=f"{missing_tool()} is not installed"),
]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    started = KafkaBroker(tmp_path_factory.mktemp("kafka"))
    started.start()
    yield started
    started.stop()


def config_of(broker: KafkaBroker) -> KafkaConfig:
    """Return a config with one consumer group for all tests: each begins after the previous one."""
    return KafkaConfig(bootstrap_servers=broker.bootstrap_servers)


async def publish(bus: MemoryBus, first: int, last: int, seed: int) -> None:
    for number in range(first, last):
        await bus.outbox.publish(request_record(number, seed=seed))


async def landed(store: Store, seed: int, num_records: int) -> None:
    """Every request of this seed is there, once, under every way of counting, with its tokens."""
    mine = f"startsWith(request_id, 'req-{seed}-')"

    async def complete() -> bool:
        return await count(store, f"requests_once WHERE {mine}") == num_records

    await eventually(complete, timeout_s=30, what=f"{num_records} requests", poll_s=POLL_S)
    assert await count(store, f"requests FINAL WHERE {mine}") == num_records
    tokens = sum(request_record(number, seed=seed).prompt_tokens for number in range(num_records))
    sums = await store.rows(f"SELECT sum(prompt_tokens) FROM requests_once WHERE {mine}")
    assert sums == [(tokens,)]


async def test_five_hundred_records_land_once(store: Store, broker: KafkaBroker) -> None:
    bus = MemoryBus(MemoryBroker())
    await publish(bus, 0, 500, seed=1)
    async with running(bus, store, config_of(broker)):
        await landed(store, 1, 500)
    raw = await store.rows("SELECT count() FROM requests")
    assert raw == [(500,)]


async def test_a_restart_goes_on_where_the_group_was(store: Store, broker: KafkaBroker) -> None:
    bus = MemoryBus(MemoryBroker())
    await publish(bus, 0, 50, seed=2)
    async with running(bus, store, config_of(broker)):
        await landed(store, 2, 50)
    before = await bus.broker.outbox.last_sequence()
    await publish(bus, 50, 100, seed=2)
    async with running(bus, store, config_of(broker)) as service:
        await landed(store, 2, 100)
        assert service.sink.num_stored <= 60, "a durable Kafka is not filled again from the outbox"
    assert before == 50


async def test_a_broker_that_is_killed_and_comes_back(store: Store, broker: KafkaBroker) -> None:
    bus = MemoryBus(MemoryBroker())
    await publish(bus, 0, 100, seed=3)
    async with running(bus, store, config_of(broker)):
        await landed(store, 3, 100)
        broker.kill()
        await publish(bus, 100, 300, seed=3)
        # In this thread: a server dies with the thread that started it.
        broker.start()
        await landed(store, 3, 300)


async def test_a_broker_that_is_killed_in_the_middle_of_a_batch(
    store: Store, broker: KafkaBroker
) -> None:
    """The rows land while the broker is down; they are read again, and merge."""
    bus = MemoryBus(MemoryBroker())
    slow = MoodyStore.over(store)
    slow.gate = asyncio.Event()
    async with running(bus, slow, config_of(broker)):
        await publish(bus, 0, 500, seed=5)
        await eventually(lambda: slow.num_held > 0, timeout_s=20, what="a batch is in hand")
        broker.kill()
        await publish(bus, 500, 700, seed=5)
        slow.gate.set()
        await eventually(lambda: slow.num_inserts > 0, timeout_s=20)
        broker.start()
        await landed(store, 5, 700)


async def test_a_rebalance_in_the_middle_of_a_batch(store: Store, broker: KafkaBroker) -> None:
    """Two members read the same records during a rebalance, and their rows merge.

    The first member cannot store its batch. A second member joins, gets some of its partitions and
    reads the same records. Later the first member's store is back.
    """
    bus = MemoryBus(MemoryBroker())
    kafka = config_of(broker)
    stuck = MoodyStore.over(store)
    stuck.away = True
    async with running(bus, stuck, kafka) as first:
        await publish(bus, 0, 1_000, seed=6)
        await eventually(lambda: stuck.num_times_away > 0, timeout_s=20, what="a batch is in hand")
        async with running(MemoryBus(bus.broker), store, kafka) as second:
            await eventually(lambda: second.sink.num_stored > 0, timeout_s=30)
            stuck.away = False
            await landed(store, 6, 1_000)
            await publish(bus, 1_000, 1_400, seed=6)
            await landed(store, 6, 1_400)
            await eventually(lambda: first.sink.num_stored > 0)
            await eventually(
                lambda: not any(first.sink.lag().values()), what="the group's lag is nothing"
            )
            assert first.sink.num_stored + second.sink.num_stored > 1_400, "some were stored twice"


async def test_a_member_that_joins_makes_nobody_store_twice(
    store: Store, broker: KafkaBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """A store that works is waited for: the next owner begins behind the batch in hand."""
    bus = MemoryBus(MemoryBroker())
    kafka = config_of(broker)
    slow = MoodyStore.over(store)
    async with running(bus, slow, kafka) as first:
        # A bridge that finds nothing stored yet replays the outbox.
        await publish(bus, 0, 50, seed=7)
        await landed(store, 7, 50)
        await eventually(lambda: not any(first.sink.lag().values()), timeout_s=20)
        slow.gate = asyncio.Event()
        await publish(bus, 50, 600, seed=7)
        await eventually(lambda: slow.num_held > 0, timeout_s=20, what="a batch is in hand")
        async with running(MemoryBus(bus.broker), store, kafka) as second:
            # The broker tells the first at its next heartbeat, and then both wait for the batch.
            await eventually(lambda: "it is rebalancing" in caplog.text, timeout_s=20)
            slow.gate.set()
            await publish(bus, 600, 1_200, seed=7)
            await landed(store, 7, 1_200)
            await eventually(lambda: not any(second.sink.lag().values()))
            assert second.sink.num_stored > 0
    raw = await store.rows("SELECT count() FROM requests WHERE startsWith(request_id, 'req-7-')")
    assert raw == [(1_200,)], "not even doubled before the merge"


async def test_two_sinks_share_the_partitions_and_one_leaves(
    store: Store, broker: KafkaBroker
) -> None:
    bus = MemoryBus(MemoryBroker())
    kafka = config_of(broker)
    num_published = 0

    async def more(count: int) -> None:
        nonlocal num_published
        await publish(bus, num_published, num_published + count, seed=4)
        num_published += count

    async with running(bus, store, kafka) as first:
        await more(200)
        async with running(MemoryBus(bus.broker), store, kafka) as second:

            async def both_work() -> bool:
                await more(5)
                return first.sink.num_stored > 0 and second.sink.num_stored > 0

            await eventually(both_work, timeout_s=30)
            await more(300)
        await more(200)
        await landed(store, 4, num_published)
