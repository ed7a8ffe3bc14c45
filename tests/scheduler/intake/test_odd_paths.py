"""Jobs that are delivered, pulled or counted in odd moments."""

from __future__ import annotations

import msgspec
import pytest

from millrace.bus.job_queue import LeasedJob, TenantQueue
from millrace.registry.routing.router import Route, Router
from millrace.scheduler.jobs.scheduled_job import JobPhase
from millrace.scheduler.scheduler import Scheduler
from millrace.schemas.config import AutoscaleConfig, TierPolicies, TierPolicy
from millrace.schemas.control import Cancel, CancelReason
from millrace.schemas.errors import BusUnavailableError
from millrace.schemas.frames import Shed
from millrace.schemas.jobs import Job, Tier
from millrace.schemas.records import Status
from tests.scheduler.integrity import check_integrity
from tests.scheduler.world import CONFIG, TENANT_QUEUE, World, job

_WORDS = {"prompt": "hello", "prompt_token_ids": None}


def redelivered(scheduler: Scheduler, request_id: str) -> LeasedJob:
    """A job that the scheduler has, as the queue would deliver it once more."""
    scheduled = scheduler.state.job_table.get(request_id)
    assert scheduled is not None
    return LeasedJob(
        job=scheduled.job,
        lease=scheduled.lease.token,
        num_deliveries=scheduled.lease.num_deliveries + 1,
        stream_sequence=scheduled.lease.stream_sequence,
        tenant_queue=scheduled.lease.tenant_queue,
    )


async def test_a_pull_that_failed_says_nothing_of_the_queue(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = world.schedulers[0].state.bus.jobs
    pull, failures = jobs.pull, [BusUnavailableError("away")]

    async def failing(
        tenant_queue: TenantQueue, max_jobs: int, timeout_s: float
    ) -> list[LeasedJob]:
        if failures:
            await world.clock.sleep(1.0)
            raise failures.pop()
        return await pull(tenant_queue, max_jobs, timeout_s)

    monkeypatch.setattr(jobs, "pull", failing)
    worker = await world.add_worker(num_slots=10)
    for number in range(10):
        await world.client.jobs.publish(job(f"r{number}"))
    await world.until(lambda: len(worker.running) == 10, within_s=3.0)


async def test_a_line_that_others_let_go_of_is_pulled_without_delay(world: World) -> None:
    """A job of the queue proves that the queue's other jobs are not held by another scheduler."""
    scheduler = world.schedulers[0]
    for number in range(10):
        await world.client.jobs.publish(job(f"r{number}"))
    others = await world.client.jobs.pull(TENANT_QUEUE, 10, 0.0)
    worker = await world.add_worker(num_slots=10)
    await world.pass_s(2.0)
    assert not worker.running
    for leased in others:
        await world.client.jobs.release(leased.lease)
    await world.until(lambda: len(worker.running) == 10, within_s=3.0)
    check_integrity(scheduler.state.fleet)


async def test_a_job_that_ends_as_it_is_delivered_again_is_over(world: World) -> None:
    worker = await world.add_worker()
    await world.client.jobs.publish(job("r1"))
    await world.until(lambda: "r1" in worker.running)
    scheduler = world.schedulers[0]
    scheduled = scheduler.state.job_table.get("r1")
    assert scheduled is not None
    await world.until(lambda: scheduled.phase is JobPhase.RUNNING)
    scheduler.pullers["m"].accept(redelivered(scheduler, "r1"))
    await worker.finish("r1")
    await world.pass_s(0.5)
    view = scheduler.state.fleet.get(worker.worker_id)
    assert view is not None
    await world.until(lambda: not len(scheduler.state.job_table))
    assert not view.runs, "no worker keeps room for it"


async def test_a_job_whose_worker_goes_as_it_is_delivered_again_runs_once(world: World) -> None:
    first = await world.add_worker("a")
    await world.client.jobs.publish(job("r1"))
    await world.until(lambda: "r1" in first.running)
    second = await world.add_worker("b")
    scheduler = world.schedulers[0]
    scheduled = scheduler.state.job_table.get("r1")
    assert scheduled is not None
    await world.until(lambda: scheduled.phase is JobPhase.RUNNING)
    scheduler.pullers["m"].accept(redelivered(scheduler, "r1"))
    scheduler._on_status(first.status(retired=True))
    await first.kill()
    await world.until(lambda: "r1" in second.running)
    await world.pass_s(1.0)
    assert len(second.history) == 1
    assert scheduler.model_queues["m"].num_here(is_batch=False) == 0
    check_integrity(scheduler.model_queues["m"].queue)


async def test_schedulers_that_shed_at_the_same_time_shed_no_more_than_one_would(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(msgspec.structs.replace(CONFIG, max_queued_jobs=300))
    await world.open()
    await world.add_scheduler()
    for scheduler in world.schedulers:
        slow_down_shedding(world, scheduler, monkeypatch)
    await world.add_worker(num_slots=1)
    for number in range(1_000):
        await world.client.jobs.publish(job(f"r{number}", reply=""), reserved=True)
    await world.until(lambda: world.num_stored < 330)
    counts = [status.num_queued for status in world.statuses]
    assert any(400 < num_queued < 900 for num_queued in counts), "the gateways are told meanwhile"
    await world.pass_s(2.0)
    assert world.num_stored >= 300 - 300 // 16 - 64
    await world.close()


async def test_a_flood_past_the_gateways_does_not_keep_their_door_shut(world: World) -> None:
    """Jobs that a service publishes itself wait and do not count against the queue's bound."""
    world.schedulers[0].state.config = msgspec.structs.replace(CONFIG, max_queued_jobs=50)
    await world.add_worker(num_slots=1)
    for second in range(8):
        for number in range(30):
            await world.client.jobs.publish(job(f"r{second}-{number}", reply="", tenant="flood"))
        await world.pass_s(1.0)
    assert world.statuses[-1].num_queued > 50
    assert not any(status.is_full for status in world.statuses)
    assert not any(isinstance(frame, Shed) for _, frame in world.frames)
    for number in range(60):
        await world.client.jobs.publish(job(f"web-{number}", reply=""), reserved=True)
    await world.until(lambda: bool(world.records()))
    assert {(one.status, one.request_id[:4]) for one in world.records()} == {(Status.SHED, "web-")}


def slow_down_shedding(world: World, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = scheduler.state.bus.jobs
    shed_newest = jobs.shed_newest

    async def shed(tenant_queue: TenantQueue, count: int) -> list[Job]:
        await world.clock.sleep(0.02)
        return await shed_newest(tenant_queue, count)

    monkeypatch.setattr(jobs, "shed_newest", shed)


async def test_our_own_claim_of_an_epoch_does_not_take_a_job_away(world: World) -> None:
    """The news of it may come when the worker has refused, and the epoch is free again."""
    first = await world.add_worker("a")
    await world.client.jobs.publish(job("r1", reply=""))
    await world.until(lambda: "r1" in first.running)
    await first.kill()
    second = await world.add_worker("b")
    second.rejection = "full"
    scheduler = world.schedulers[0]
    await world.pass_s(4.0)
    scheduler._on_cancel(Cancel(request_id="r1", reason=CancelReason.SUPERSEDED, below_epoch=2))
    scheduled = scheduler.state.job_table.get("r1")
    assert scheduled is not None
    assert scheduled.phase is JobPhase.WAITING
    second.rejection = ""
    await world.until(lambda: "r1" in second.running, within_s=2.0)
    assert second.history[0].epoch == 2


async def test_jobs_without_a_model_wake_one_that_has_no_workers() -> None:
    config = msgspec.structs.replace(
        CONFIG,
        models=("small", "large"),
        max_queued_jobs=20,
        autoscale=AutoscaleConfig(min_workers=0, max_workers=4, idle_s=1.0, scale_down_after_s=1.0),
    )
    router = Router({"auto": Route(small="small", large="large")})
    world = World(config, models=("small", "large"), router=router)
    await world.open()
    for number in range(60):
        await world.client.jobs.publish(job(f"r{number}", model="auto", **_WORDS), reserved=True)
    await world.pass_s(5.0)
    wanted = {status.model for status in world.statuses[-2:] if status.desired_workers}
    assert wanted == {"small"}
    assert world.num_stored <= 22, "they are bounded like all others"
    await world.close()


async def test_room_at_any_of_its_models_lets_a_job_without_a_model_go_on() -> None:
    config = msgspec.structs.replace(CONFIG, models=("small", "large"), status_interval_s=60.0)
    router = Router({"auto": Route(small="small", large="large")})
    world = World(config, models=("small", "large"), router=router)
    await world.open()
    await world.pass_s(1.0)
    await world.client.jobs.publish(job("r1", model="auto", **_WORDS))
    await world.pass_s(1.0)
    large = await world.add_worker("l", model="large")
    await world.until(lambda: "r1" in large.running, within_s=2.0)
    await world.close()


async def test_a_burst_is_not_refused_for_the_first_short_answer() -> None:
    """A single completion says little about the rate, so the workers' reported speeds count."""
    tiers = TierPolicies(free=TierPolicy(weight=1.0, ttft_bound_ms=5_000.0, shed=True))
    world = World(msgspec.structs.replace(CONFIG, tiers=tiers, window_jobs_per_tenant=64))
    await world.open()
    worker = await world.add_worker(num_slots=8)
    worker.decode_step_ms = 20.0
    for number in range(16):
        await world.client.jobs.publish(job(f"r{number}", received_ns=world.clock.now_ns()))
    await world.until(lambda: len(worker.running) == 8)
    await worker.finish("r0")
    await world.pass_s(2.0)
    assert not any(isinstance(frame, Shed) for _, frame in world.frames)
    await world.close()


async def test_nobody_is_refused_because_a_worker_has_to_start_again() -> None:
    """The window's remaining completions include the time without a worker."""
    tiers = TierPolicies(free=TierPolicy(weight=1.0, ttft_bound_ms=30_000.0, shed=True))
    world = World(msgspec.structs.replace(CONFIG, tiers=tiers, window_jobs_per_tenant=64))
    await world.open()
    first = await world.add_worker("w", num_slots=9)
    await world.pass_s(10.0)
    for number in range(9):
        await world.client.jobs.publish(job(f"calm-{number}"))
    await world.until(lambda: len(first.running) == 9)
    for number in range(8):
        await first.finish(f"calm-{number}")
    await world.pass_s(2.0)
    await first.finish("calm-8")
    await first.kill()
    for number in range(25):
        await world.client.jobs.publish(job(f"r{number}", received_ns=world.clock.now_ns()))
    # Of the ends that were counted one is left, 9 s ago.
    await world.pass_s(9.0)
    again = await world.add_worker("w", num_slots=9)
    await world.until(lambda: len(again.running) == 9)
    await world.pass_s(2.0)
    assert not any(isinstance(frame, Shed) for _, frame in world.frames)
    await world.close()


async def test_few_jobs_are_pulled_while_their_model_is_looked_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = msgspec.structs.replace(CONFIG, models=("small", "large"))
    world = World(
        config,
        models=("small", "large"),
        router=Router({"auto": Route(small="small", large="large")}),
    )
    await world.open()
    settle = world.running_requests.settle_model
    is_away = True

    async def slow(request_id: str, model: str, reason: str) -> tuple[str, str]:
        while is_away:
            await world.clock.sleep(0.1)
        return await settle(request_id, model, reason)

    monkeypatch.setattr(world.running_requests, "settle_model", slow)
    worker = await world.add_worker("s", num_slots=2, model="small")
    for number in range(400):
        await world.client.jobs.publish(job(f"r{number}", model="auto", **_WORDS))
    await world.pass_s(1.0)
    depth = await world.client.jobs.depth(TenantQueue("auto", Tier.FREE, "local"))
    assert depth.num_leased <= 80
    is_away = False
    await world.until(lambda: len(worker.running) == 2)
    await world.close()
