"""Abilities of the in-memory broker alone: a manual clock, and stops on demand."""

from __future__ import annotations

import asyncio

import pytest

from millrace.bus.job_queue import TenantQueue
from millrace.bus.memory import MemoryBroker, MemoryBus
from millrace.schemas.config import NatsConfig
from millrace.schemas.control import WorkerStatus
from millrace.schemas.errors import BusUnavailableError
from millrace.schemas.frames import Accepted, Frame
from millrace.schemas.jobs import Job, JobResult, Tier
from tests.support.manual_clock import ManualClock

JOB = Job(request_id="r1", model="demo", prompt="x")
TENANT_QUEUE = TenantQueue.of(JOB)
OTHER = TenantQueue("none", Tier.FREE, "local")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def bus(clock: ManualClock) -> MemoryBus:
    return MemoryBus(MemoryBroker(clock, NatsConfig(ack_wait_s=6.0, results_ttl_s=60.0)))


async def test_a_lease_lasts_as_long_as_the_clock_says(bus: MemoryBus, clock: ManualClock) -> None:
    await bus.jobs.publish(JOB)
    await bus.jobs.pull(TENANT_QUEUE, 1, 0.0)
    waiting = asyncio.ensure_future(bus.jobs.pull(TENANT_QUEUE, 1, 100.0))
    await clock.advance(5.9)
    assert not waiting.done()
    await clock.advance(0.2)
    (leased,) = await waiting
    assert leased.num_deliveries == 2
    await clock.advance(5.0)
    await bus.jobs.extend(leased.lease)
    await clock.advance(5.0)
    assert await bus.jobs.pull(TENANT_QUEUE, 1, 0.0) == []


async def test_an_empty_pull_ends_at_its_time(bus: MemoryBus, clock: ManualClock) -> None:
    waiting = asyncio.ensure_future(bus.jobs.pull(TENANT_QUEUE, 1, 3.0))
    await clock.advance(2.9)
    assert not waiting.done()
    await clock.advance(0.1)
    assert await waiting == []


async def test_entries_and_results_expire(bus: MemoryBus, clock: ManualClock) -> None:
    await bus.workers.announce(
        WorkerStatus(worker_id="w", name="w", model="demo", max_num_sequences=1)
    )
    await bus.results.store(JobResult(request_id="r", tenant="t", model="demo", status="done"))
    await clock.advance(30.0)
    seen: list[WorkerStatus] = []
    await bus.workers.watch(seen.append)
    assert seen == []
    assert await bus.results.fetch("t", "r") is not None
    await clock.advance(31.0)
    assert await bus.results.fetch("t", "r") is None


async def test_an_outage(bus: MemoryBus, clock: ManualClock) -> None:
    other = MemoryBus(bus.broker)
    seen: list[tuple[str, Frame]] = []
    reconnects: list[bool] = []
    await other.frames.subscribe("g", lambda *pair: seen.append(pair))
    other.on_reconnect(lambda: reconnects.append(other.connected))
    await bus.jobs.publish(JOB)
    waiting = asyncio.ensure_future(other.jobs.pull(OTHER, 1, 50.0))
    bus.broker.stop()
    assert not bus.connected
    for call in (
        bus.jobs.publish(JOB),
        bus.jobs.depth(TENANT_QUEUE),
        bus.jobs.shed_newest(TENANT_QUEUE, 1),
        bus.jobs.tenant_queues(),
        bus.jobs.forget_tenant_queue(TENANT_QUEUE),
        bus.results.fetch("t", "r"),
        bus.outbox.last_sequence(),
        bus.workers.watch(lambda status: None),
    ):
        with pytest.raises(BusUnavailableError):
            await call
    await bus.frames.publish("g", [("lost", Accepted())])
    assert await bus.control.resume_point("g", "r", 1.0) is None
    pulling = asyncio.ensure_future(bus.jobs.pull(TENANT_QUEUE, 1, 50.0))
    await clock.advance(1.0)
    assert not pulling.done()
    bus.broker.start()
    assert len(await pulling) == 1
    await bus.frames.publish("g", [("r1", Accepted())])
    await clock.advance(0.0)
    assert seen == [("r1", Accepted())]
    assert reconnects == [True]
    await clock.advance(50.0)
    assert await waiting == []


async def test_a_server_that_lost_its_last_deliveries(bus: MemoryBus) -> None:
    await bus.jobs.pull(TENANT_QUEUE, 1, 0.0)
    await bus.jobs.publish(JOB)
    (held,) = await bus.jobs.pull(TENANT_QUEUE, 1, 0.0)
    assert not held.uncertain
    bus.broker.stop()
    bus.broker.start(lost_deliveries=True)
    (again,) = await bus.jobs.pull(TENANT_QUEUE, 1, 0.0)
    assert (again.stream_sequence, again.num_deliveries) == (held.stream_sequence, 1)
    assert again.uncertain
    await bus.jobs.ack(held.lease)
    assert await bus.jobs.tenant_queues() == {}


async def test_a_closed_client_hears_nothing(bus: MemoryBus, clock: ManualClock) -> None:
    other = MemoryBus(bus.broker)
    seen: list[tuple[str, Frame]] = []
    await other.frames.subscribe("g", lambda *pair: seen.append(pair))
    await other.close()
    await other.close()
    await bus.frames.publish("g", [("r1", Accepted())])
    await clock.advance(0.0)
    assert (seen, other.connected) == ([], False)
