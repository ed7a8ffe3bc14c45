"""Requests without a gateway: found after the grace, and never while it may live."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
from msgspec.structs import replace

from millrace.bus.memory import MemoryBroker, MemoryBus
from millrace.bus.orphans import OrphanWatch
from millrace.bus.transport import Subscription
from millrace.schemas.control import ResumePoint
from millrace.schemas.jobs import Job, Source
from tests.support.manual_clock import ManualClock

GRACE_S = 60.0
JOB = Job(request_id="r1", model="m", prompt_token_ids=(1,), reply="gw-1", source=Source.HTTP)


class Fleet:
    """Orphan watch over ``jobs``, and gateways with the held requests of a test."""

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self.clock = ManualClock()
        self.broker = MemoryBroker(self.clock)
        self.jobs: list[Job] = [JOB]
        self.found: list[str] = []
        self.bus = MemoryBus(self.broker)
        self.watch = OrphanWatch(self.bus, self.clock, lambda: self.jobs, self._end)
        self.watch.grace_s = grace_s

    def _end(self, request_id: str) -> None:
        self.found.append(request_id)
        self.jobs = [job for job in self.jobs if job.request_id != request_id]

    async def gateway(self, reply: str, *held: str) -> Subscription:
        """Start a gateway that holds the requests ``held`` addressed to ``reply``."""
        control = MemoryBus(self.broker).control
        return await control.serve_resume_points(reply, lambda _: None, set(held).__contains__)

    async def pass_s(self, seconds: float) -> None:
        """Advance the clock in steps of a tenth of a second."""
        for _ in range(round(seconds * 10)):
            await self.clock.advance(0.1)


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    made = Fleet()
    task = asyncio.create_task(made.watch.run())
    yield made
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_a_request_is_an_orphan_after_the_grace(fleet: Fleet) -> None:
    gateway = await fleet.gateway("gw-1", "r1")
    await fleet.pass_s(3 * GRACE_S)
    assert fleet.found == []
    await gateway.close()
    await fleet.pass_s(GRACE_S - 1.0)
    assert fleet.found == []
    await fleet.pass_s(5.0)
    assert fleet.found == ["r1"]
    assert fleet.watch.num_found == 1


async def test_a_gateway_started_again_under_its_id_does_not_hold_what_it_had(fleet: Fleet) -> None:
    """The gateway holds only requests that it received after the restart."""
    fleet.jobs = [JOB, replace(JOB, request_id="r2")]
    await fleet.gateway("gw-1", "r2")
    await fleet.pass_s(GRACE_S + 5.0)
    assert fleet.found == ["r1"]


async def test_a_request_belongs_to_the_gateway_that_took_it_over(fleet: Fleet) -> None:
    await fleet.pass_s(GRACE_S - 5.0)
    second = await fleet.gateway("gw-1", "r1")
    await fleet.pass_s(2 * GRACE_S)
    assert fleet.found == []
    await second.close()
    await fleet.pass_s(GRACE_S - 1.0)
    assert fleet.found == []
    await fleet.pass_s(5.0)
    assert fleet.found == ["r1"]


async def test_a_gateway_that_is_silent_for_a_while_keeps_its_requests(fleet: Fleet) -> None:
    for _ in range(5):
        gateway = await fleet.gateway("gw-1", "r1")
        await fleet.pass_s(5.0)
        await gateway.close()
        await fleet.pass_s(20.0)
    assert fleet.found == []


async def test_jobs_that_waited_for_a_gateway_long_gone_end_soon(fleet: Fleet) -> None:
    """Jobs received before a known orphan end at once; later jobs have the whole grace period."""
    fleet.jobs = [replace(JOB, received_ns=20)]
    await fleet.pass_s(GRACE_S + 5.0)
    assert fleet.found == ["r1"]
    received = {"earlier": 10, "same": 20, "later": 30, "taken": 10}
    await fleet.gateway("gw-1", "taken")
    fleet.jobs = [
        replace(JOB, request_id=name, received_ns=at_ns) for name, at_ns in received.items()
    ]
    fleet.jobs.append(replace(JOB, request_id="other", received_ns=10, reply="gw-2"))
    await fleet.pass_s(GRACE_S / 2)
    assert fleet.found == ["r1", "earlier", "same"]


async def test_a_gateway_of_an_older_version_is_asked_for_each_request(fleet: Fleet) -> None:
    fleet.jobs = [replace(JOB, request_id=name) for name in ("r1", "r2")]
    points = {"r2": ResumePoint(token_ids=(1, 2))}
    await MemoryBus(fleet.broker).control.serve_resume_points("gw-1", points.get)
    await fleet.pass_s(2 * GRACE_S)
    assert fleet.found == ["r1"]


async def test_the_grace_starts_again_after_an_outage_of_the_bus(fleet: Fleet) -> None:
    await fleet.pass_s(GRACE_S - 5.0)
    fleet.broker.stop()
    await fleet.pass_s(GRACE_S)
    fleet.broker.start()
    await fleet.pass_s(GRACE_S - 5.0)
    assert fleet.found == []
    await fleet.pass_s(10.0)
    assert fleet.found == ["r1"]


async def test_the_grace_starts_again_after_an_outage_between_two_looks(fleet: Fleet) -> None:
    await fleet.pass_s(GRACE_S - 5.0)
    fleet.broker.stop()
    fleet.broker.start()
    await fleet.pass_s(GRACE_S - 5.0)
    assert fleet.found == []


async def test_an_outage_during_a_question_says_nothing(fleet: Fleet) -> None:
    await fleet.watch.look()
    fleet.clock.skip(GRACE_S)
    asking = asyncio.create_task(fleet.watch.look())
    await asyncio.sleep(0)
    fleet.broker.stop()
    fleet.broker.start()
    await asking
    assert fleet.found == []


async def test_the_grace_starts_again_after_this_process_stood_still(fleet: Fleet) -> None:
    await fleet.pass_s(5.0)
    fleet.clock.skip(10 * GRACE_S)
    await fleet.pass_s(GRACE_S - 5.0)
    assert fleet.found == []


@pytest.mark.parametrize(
    "changes",
    [
        {"source": Source.NATS, "reply": "acme"},
        {"source": Source.BENCH},
        {"store_result": True},
        {"reply": ""},
    ],
    ids=["service", "benchmark", "stored", "no-listener"],
)
async def test_jobs_that_await_no_client_are_left_alone(
    fleet: Fleet, changes: dict[str, object]
) -> None:
    fleet.jobs = [replace(JOB, **changes)]
    await fleet.pass_s(3 * GRACE_S)
    assert fleet.found == []


async def test_without_a_grace_nothing_is_an_orphan() -> None:
    fleet = Fleet(grace_s=0.0)
    await fleet.watch.run()
    assert fleet.clock.num_sleepers == 0
