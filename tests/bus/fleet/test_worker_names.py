"""Exclusive worker names, on the in-memory broker and on nats-server."""

from __future__ import annotations

import asyncio

import pytest

from millrace.bus.api import Bus
from millrace.bus.fleet.directory import (
    MISSED_RENEWALS,
    RENEWAL_BEATS,
    WorkerName,
    new_worker_name,
)
from millrace.bus.memory import MemoryBroker, MemoryBus
from millrace.runtime.clock import SystemClock
from millrace.schemas.config import SchedulerConfig, WorkerConfig
from millrace.schemas.control import NameLease
from millrace.schemas.errors import NameTakenError
from tests.bus.conftest import Broker
from tests.support.manual_clock import ManualClock
from tests.support.waiting import eventually

_RENEW_S = 0.1
_WITHIN_S = 20.0


def _name(bus: Bus, renew_s: float = _RENEW_S) -> WorkerName:
    return WorkerName(bus.workers, SystemClock(), "gpu.1 é", renew_s)


async def test_a_second_holder_is_refused(bus: Bus, broker: Broker) -> None:
    first = _name(bus)
    await first.claim()
    renewing = asyncio.create_task(first.run())
    other = await broker.connect("other")
    with pytest.raises(NameTakenError, match=r"Another worker named 'gpu\.1 é' is running"):
        await asyncio.wait_for(_name(other).claim(), _WITHIN_S)
    assert first.held.is_set()
    assert not renewing.done()
    renewing.cancel()


async def test_one_of_many_concurrent_claims_gets_the_name(broker: Broker) -> None:
    names = [_name(await broker.connect(f"w{number}")) for number in range(6)]

    async def hold(name: WorkerName) -> None:
        await name.claim()
        await name.run()

    tasks = [asyncio.create_task(hold(name)) for name in names]
    await eventually(lambda: sum(task.done() for task in tasks) == 5, _WITHIN_S)
    assert [name.held.is_set() for name in names].count(True) == 1
    for name, task in zip(names, tasks, strict=True):
        if name.held.is_set():
            task.cancel()
        else:
            assert isinstance(task.exception(), NameTakenError)


async def test_the_name_of_a_killed_worker_is_soon_free(bus: Bus, broker: Broker) -> None:
    """A missed renewal is enough: the name is free before its lease is forgotten."""
    await _name(bus).claim()
    again = await broker.connect("again")
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await asyncio.wait_for(_name(again).claim(), _WITHIN_S)
    assert loop.time() - began_s >= MISSED_RENEWALS * _RENEW_S, "only when it is sure"


def test_a_name_is_not_free_before_its_holder_counts_as_dead() -> None:
    renew_s = RENEWAL_BEATS * WorkerConfig().heartbeat_s
    assert MISSED_RENEWALS * renew_s > SchedulerConfig().heartbeat_timeout_s


async def test_a_name_that_was_given_back_is_free_at_once(bus: Bus, broker: Broker) -> None:
    first = _name(bus, renew_s=3_600.0)
    await first.claim()
    await first.give_back()
    again = _name(await broker.connect("again"), renew_s=3_600.0)
    await asyncio.wait_for(again.claim(), _WITHIN_S)
    assert again.held.is_set()


async def test_a_frozen_worker_that_lost_its_name_is_told(bus: Bus, broker: Broker) -> None:
    first = _name(bus)
    await first.claim()  # and does not renew it
    second = _name(await broker.connect("second"))
    await asyncio.wait_for(second.claim(), _WITHIN_S)
    renewing = asyncio.create_task(second.run())
    with pytest.raises(NameTakenError):
        await asyncio.wait_for(first.run(), _WITHIN_S)
    assert second.held.is_set()
    renewing.cancel()


async def test_a_forgotten_name_lease_is_written_again() -> None:
    """The lease is missing after an outage of the server, whose bucket is in memory."""
    clock = ManualClock()
    bus = MemoryBus(MemoryBroker(clock))
    name = WorkerName(bus.workers, clock, "w", 0.5)
    await name.claim()
    await clock.advance(60.0)
    assert await bus.workers.name_holder("w") is None
    renewing = asyncio.create_task(name.run())
    await clock.advance(1.0)
    assert await bus.workers.name_holder("w") is not None
    assert not renewing.done()
    renewing.cancel()


async def test_leases_are_no_workers_and_revisions_are_checked(bus: Bus) -> None:
    lease = NameLease(holder="a", renew_s=1.0)
    revision = await bus.workers.hold_name("w", lease, 0)
    assert revision
    assert await bus.workers.hold_name("w", NameLease(holder="b"), 0) is None
    assert await bus.workers.hold_name("w", NameLease(holder="b"), revision + 1) is None
    found = await bus.workers.name_holder("w")
    assert found is not None
    assert (found.lease, found.revision) == (lease, revision)
    seen: list[object] = []
    await bus.workers.watch(seen.append)
    assert seen == []
    assert await bus.workers.name_holder("nobody") is None


def test_drawn_names_differ() -> None:
    assert new_worker_name() != new_worker_name()
