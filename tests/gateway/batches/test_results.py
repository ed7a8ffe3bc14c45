"""Waiting for a batch line's result while the store of results cannot be reached."""

from __future__ import annotations

import asyncio

import pytest

from millrace.bus.job_queue import TenantQueue
from millrace.bus.memory import MemoryBroker, MemoryBus
from millrace.gateway.batches.line_run import ResultWaiter
from millrace.schemas.errors import BusUnavailableError
from millrace.schemas.jobs import Job, JobResult
from millrace.schemas.records import Status
from tests.support.manual_clock import ManualClock

_JOB = Job(request_id="r1", model="demo", prompt="hi", store_result=True)
_RESULT = JobResult(request_id="r1", tenant=_JOB.tenant, model="demo", status=Status.DONE)


async def waiting(bus: MemoryBus, clock: ManualClock) -> asyncio.Task[JobResult | None]:
    """Start a wait for the result of a job that has left the queue."""
    published = await bus.jobs.publish(_JOB)
    [leased] = await bus.jobs.pull(TenantQueue.of(_JOB), 1, 0.0)
    await bus.jobs.ack(leased.lease)
    waiter = ResultWaiter(bus, _JOB.tenant, clock)
    return asyncio.create_task(waiter.wait("r1", published.stream_sequence))


async def test_a_store_that_nobody_reaches_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def unreachable(_tenant: str, _request_id: str) -> JobResult | None:
        raise BusUnavailableError("no answer in time")

    clock = ManualClock()
    bus = MemoryBus(MemoryBroker(clock))
    task = await waiting(bus, clock)
    await clock.advance(30)
    with monkeypatch.context() as patched:
        patched.setattr(bus.results, "fetch", unreachable)
        await clock.advance(300)
        assert not task.done()
    await clock.advance(50)
    assert not task.done()
    await bus.results.store(_RESULT)
    await clock.advance(6)
    assert task.result() == _RESULT


async def test_a_result_that_the_store_does_not_get_is_given_up() -> None:
    clock = ManualClock()
    task = await waiting(MemoryBus(MemoryBroker(clock)), clock)
    await clock.advance(80)
    assert task.result() is None
