"""Requests of a tenant's service to a scheduler: to cancel its jobs, and for its results."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from unittest.mock import AsyncMock

import msgspec
import pytest

from millrace.bus import subjects
from millrace.bus.running_requests import RunningRequest
from millrace.bus.transport import Message
from millrace.scheduler.jobs.scheduled_job import ScheduledJob
from millrace.scheduler.stages import send
from millrace.scheduler.state import SchedulerState
from millrace.schemas.control import Cancel
from millrace.schemas.errors import BusUnavailableError, ResultNotFoundError
from millrace.schemas.frames import Cancelled, Done
from millrace.schemas.jobs import Job, JobResult
from millrace.schemas.records import Status
from tests.scheduler.world import World, job


def cancel(world: World, tenant: str, request_id: str) -> None:
    world.broker.publish(subjects.owner_cancel(tenant, request_id), b"")


async def ask(world: World, tenant: str, request_id: str) -> dict[str, Any]:
    """The answer to a request for a result, as a service gets it."""
    answers: list[Message] = []
    inbox = world.broker.new_inbox()
    subscriber = world.broker.subscribe(inbox, answers.append)
    world.broker.publish(subjects.result_request(tenant, request_id), b"", reply=inbox)
    await world.until(lambda: bool(answers))
    await subscriber.close()
    (answer,) = answers
    found: dict[str, Any] = msgspec.json.decode(answer.payload)
    return found


async def told(world: World, tenant: str, request_id: str) -> tuple[str, bool]:
    """The code of the error that a service gets for a result, and whether it is retryable."""
    error = (await ask(world, tenant, request_id))["error"]
    return error["code"], error["retryable"]


def acme_job(request_id: str) -> Job:
    return job(request_id, tenant="acme", store_result=True)


# --- cancels ---------------------------------------------------------------------------------


async def test_a_service_cancels_its_job_in_the_queue_and_no_others(world: World) -> None:
    for request_id in ("r1", "r2"):
        await world.client.jobs.publish(acme_job(request_id))
    cancel(world, "acme", "r1")
    cancel(world, "shop", "r2")
    await world.pass_s(3_600.0)
    worker = await world.add_worker()
    await world.until(lambda: "r2" in worker.running)
    assert isinstance(world.terminal("r1"), Cancelled)
    assert [dispatch.job.request_id for dispatch in worker.history] == ["r2"]
    found = await ask(world, "acme", "r1")
    assert found["status"] == "cancelled"


async def test_a_service_cancels_its_job_before_it_is_published(world: World) -> None:
    cancel(world, "acme", "r1")
    cancel(world, "shop", "r2")
    worker = await world.add_worker()
    for request_id in ("r1", "r2"):
        await world.client.jobs.publish(acme_job(request_id))
    await world.until(lambda: isinstance(world.terminal("r1"), Cancelled))
    await world.until(lambda: "r2" in worker.running)


async def test_a_cancel_outlives_the_schedulers_that_heard_it(world: World) -> None:
    for request_id in ("r1", "r2"):
        await world.client.jobs.publish(acme_job(request_id))
    cancel(world, "acme", "r1")
    cancel(world, "shop", "r2")
    await world.pass_s(10.0)
    await world.kill_scheduler()
    await world.add_scheduler()
    worker = await world.add_worker()
    await world.until(lambda: "r2" in worker.running)
    assert isinstance(world.terminal("r1"), Cancelled)
    assert [dispatch.job.request_id for dispatch in worker.history] == ["r2"]


async def test_a_flood_of_cancels_waits_for_redis_within_bounds(world: World) -> None:
    calls: list[tuple[str, int]] = []
    may_answer = asyncio.Event()

    async def note_cancels(tenant: str, request_ids: Sequence[str]) -> None:
        calls.append((tenant, len(request_ids)))
        await may_answer.wait()

    world.running_requests.note_cancels = note_cancels  # type: ignore[method-assign]
    for number in range(3_000):
        cancel(world, "shop", f"r{number}")
    cancel(world, "acme", "r1")
    await world.until(lambda: len(calls) == 1)
    may_answer.set()
    await world.until(lambda: ("acme", 1) in calls)
    assert sum(count for tenant, count in calls if tenant == "shop") <= 2_000


async def test_a_cancel_that_an_outage_swallowed_is_recalled(world: World) -> None:
    await world.client.jobs.publish(acme_job("r1"))
    await world.pass_s(10.0)
    # Another scheduler heard it.
    await world.running_requests.note_cancels("acme", ["r1"])
    world.schedulers[0]._on_reconnect()
    await world.add_worker()
    await world.until(lambda: isinstance(world.terminal("r1"), Cancelled))


async def test_jobs_that_come_while_cancels_are_heard_are_not_looked_up(world: World) -> None:
    await world.pass_s(10.0)
    lookup = world.running_requests.was_cancelled = AsyncMock(return_value=False)  # type: ignore[method-assign]
    worker = await world.add_worker()
    await world.client.jobs.publish(acme_job("r1"))
    await world.until(lambda: "r1" in worker.running)
    lookup.assert_not_awaited()


async def test_a_service_cancels_its_job_that_a_scheduler_holds(world: World) -> None:
    worker = await world.add_worker()
    worker.rejection = "full"
    await world.client.jobs.publish(acme_job("r1"))
    await world.until(lambda: bool(world.frames_of("r1")))
    cancel(world, "shop", "r1")
    await world.pass_s(0.5)
    assert world.terminal("r1") is None
    cancel(world, "acme", "r1")
    await world.until(lambda: world.num_stored == 0, within_s=0.3)
    assert isinstance(world.terminal("r1"), Cancelled)


async def test_a_cancel_that_overtook_the_dispatch_is_repeated(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await world.add_worker()
    accepted = send.accepted

    def cancel_first(state: SchedulerState, scheduled: ScheduledJob) -> None:
        tenant = "acme" if scheduled.request_id == "r2" else "shop"
        state.cancels.add(Cancel(request_id=scheduled.request_id, tenant=tenant), 0.0)
        accepted(state, scheduled)

    monkeypatch.setattr(send, "accepted", cancel_first)
    for request_id in ("r1", "r2"):
        await world.client.jobs.publish(acme_job(request_id))
    await world.until(lambda: len(worker.running) == 2 and bool(worker.cancels))
    await world.pass_s(1.0)
    assert worker.cancels == [Cancel(request_id="r2")]


@pytest.mark.parametrize("request_id", ["never", "é.x y", "%"])
async def test_a_cancel_of_no_job_or_of_one_that_ended_changes_nothing(
    world: World, request_id: str
) -> None:
    worker = await world.add_worker()
    await world.client.jobs.publish(acme_job("r1"))
    await world.until(lambda: "r1" in worker.running)
    await worker.finish("r1")
    await world.until(lambda: world.terminal("r1") is not None)
    frames = world.frames_of("r1")
    cancel(world, "acme", "r1")
    cancel(world, "acme", request_id)
    world.broker.publish("ctl.cancel.%.r2", b"")
    world.broker.publish("ctl.cancel.a%zz.r2", b"")
    await world.client.jobs.publish(acme_job("r2"))
    await world.until(lambda: "r2" in worker.running)
    await world.pass_s(1.0)
    assert world.frames_of("r1") == frames
    assert world.terminal("r2") is None


# --- results ---------------------------------------------------------------------------------


async def test_a_service_gets_its_result_or_why_there_is_none(world: World) -> None:
    assert await told(world, "acme", "r1") == ("result_not_found", False)
    await world.client.jobs.publish(acme_job("r1"))
    await world.until(lambda: bool(world.schedulers[0].models.pullers["m"].backlog))
    await world.pass_s(1.0)
    # In the queue request ids cannot be seen.
    error = (await ask(world, "acme", "r1"))["error"]
    assert (error["code"], error["retryable"]) == ("result_not_found", True)
    assert "1 waiting job" in error["message"]
    assert await told(world, "shop", "r1") == ("result_not_found", False)
    worker = await world.add_worker()
    await world.until(lambda: "r1" in worker.running)
    assert await told(world, "acme", "r1") == ("result_not_ready", True)
    assert await told(world, "shop", "r1") == ("result_not_found", False)
    result = JobResult(request_id="r1", tenant="acme", model="m", status="done", text="ok")
    await world.client.results.store(result)
    await worker.finish("r1")
    assert await ask(world, "acme", "r1") == msgspec.to_builtins(result)
    assert await told(world, "shop", "r1") == ("result_not_found", False)


async def test_a_tenant_that_asks_for_too_many_results_at_once_hinders_no_other(
    world: World,
) -> None:
    may_answer = asyncio.Event()

    async def fetch(_tenant: str, _request_id: str) -> None:
        await may_answer.wait()

    world.schedulers[0].state.bus.results.fetch = fetch  # type: ignore[method-assign,assignment]
    find = world.schedulers[0]._results.find
    looking = [asyncio.create_task(find("shop", f"r{number}")) for number in range(256)]
    await asyncio.sleep(0)
    with pytest.raises(BusUnavailableError, match="Tenant shop"):
        await find("shop", "r256")
    looking.append(asyncio.create_task(find("acme", "r1")))
    may_answer.set()
    found = await asyncio.gather(*looking, return_exceptions=True)
    assert {type(one) for one in found} == {ResultNotFoundError}
    with pytest.raises(ResultNotFoundError):
        await find("shop", "r256")


async def test_an_ended_job_without_a_result_is_told_from_an_unknown_one(world: World) -> None:
    worker = await world.add_worker()
    await world.client.jobs.publish(job("r1", tenant="acme"))
    await world.until(lambda: "r1" in worker.running)
    await worker.finish("r1")
    await world.until(lambda: world.num_stored == 0)
    world.running_requests.known["r1"] = RunningRequest(worker_id="w", epoch=1, finished=True)
    assert await told(world, "acme", "r1") == ("result_not_stored", False)
    assert isinstance(world.terminal("r1"), Done)


async def test_an_expired_job_has_a_result_that_says_so(world: World) -> None:
    late = msgspec.structs.replace(acme_job("r1"), deadline_ns=world.clock.now_ns() - 1)
    await world.add_worker()
    await world.client.jobs.publish(late)
    await world.until(lambda: world.num_stored == 0)
    assert (await ask(world, "acme", "r1"))["status"] == Status.EXPIRED


async def test_a_request_while_the_store_is_away_may_be_repeated(world: World) -> None:
    away = AsyncMock(side_effect=BusUnavailableError("The message bus cannot be reached."))
    world.schedulers[0].state.bus.results.fetch = away  # type: ignore[method-assign]
    assert await told(world, "acme", "r1") == ("bus_unavailable", True)
