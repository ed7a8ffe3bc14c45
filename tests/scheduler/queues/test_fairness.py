"""Fairness among many tenants and tiers through a whole scheduler."""

from __future__ import annotations

import asyncio
from collections import Counter

import msgspec
import pytest

from millrace.registry.routing.router import Route, Router
from millrace.schemas.config import TierPolicies, TierPolicy
from millrace.schemas.frames import Queued, Shed
from millrace.schemas.jobs import Tier
from millrace.schemas.records import Status
from millrace.schemas.sampling import SamplingParams
from tests.scheduler.integrity import check_integrity
from tests.scheduler.scripted_worker import ScriptedWorker
from tests.scheduler.world import CONFIG, World, job


async def work_off(world: World, worker: ScriptedWorker, num_jobs: int) -> list[str]:
    """Let jobs run one after the other; the tenants in the order in which they were served."""
    for _ in range(num_jobs):
        await world.until(lambda: bool(worker.running))
        await worker.finish(next(iter(worker.running)))
    return [dispatch.job.tenant for dispatch in worker.history[:num_jobs]]


async def test_a_backlog_does_not_hide_another_tenants_first_job(world: World) -> None:
    worker = await world.add_worker(num_slots=1)
    for number in range(300):
        await world.client.jobs.publish(job(f"heavy-{number}", tenant="heavy"))
    await work_off(world, worker, 3)
    await world.client.jobs.publish(job("light-1", tenant="light"))
    served = await work_off(world, worker, 6)
    assert "light" in served[3:6]


async def test_backlogged_tenants_share_evenly(world: World) -> None:
    worker = await world.add_worker(num_slots=1)
    for number in range(40):
        await world.client.jobs.publish(job(f"a-{number}", tenant="a"))
        if number < 30:
            await world.client.jobs.publish(job(f"b-{number}", tenant="b"))
            long = SamplingParams(max_tokens=64, seed=1)
            await world.client.jobs.publish(job(f"c-{number}", tenant="c", sampling=long))
    served = Counter(await work_off(world, worker, 60))
    assert abs(served["a"] - served["b"]) <= 1
    # Its jobs are 3.7 times as large: 3 + 2 * 64 beside 3 + 2 * 16 tokens.
    assert served["c"] == pytest.approx(served["a"] / 3.74, abs=2)


async def test_batch_work_waits_for_everybody(world: World) -> None:
    worker = await world.add_worker(num_slots=1)
    for number in range(5):
        await world.client.jobs.publish(job(f"batch-{number}", tenant="b", tier=Tier.BATCH))
    await world.until(lambda: bool(worker.running))
    for number in range(5):
        await world.client.jobs.publish(job(f"free-{number}", tenant="f"))
    await world.pass_s(1.0)
    served = await work_off(world, worker, 10)
    first_batch = served.index("b")
    assert served[first_batch + 1 : first_batch + 6] == ["f"] * 5


async def test_a_higher_tier_is_sent_to_a_worker_that_is_full_of_batch_work(world: World) -> None:
    worker = await world.add_worker(num_slots=2)
    for number in range(4):
        await world.client.jobs.publish(job(f"batch-{number}", tenant="b", tier=Tier.BATCH))
    await world.until(lambda: len(worker.running) == 2)
    worker.num_slots = 3  # it would preempt one
    await world.client.jobs.publish(job("urgent", tenant="e", tier=Tier.ENTERPRISE))
    await world.until(lambda: "urgent" in worker.running)
    assert [d.job.tier for d in worker.history] == [Tier.BATCH, Tier.BATCH, Tier.ENTERPRISE]


async def test_waiting_jobs_are_told_their_position(world: World) -> None:
    worker = await world.add_worker(num_slots=1)
    for number in range(3):
        await world.client.jobs.publish(job(f"r{number}"))
        await world.until(lambda: bool(worker.running))
    await world.until(lambda: bool(world.frames_of("r2")))
    told = [frame for frame in world.frames_of("r2") if isinstance(frame, Queued)]
    assert told[0].position == 1
    for name in ("r0", "r1", "r2"):
        await world.until(lambda name=name: name in worker.running)  # type: ignore[misc]
        await worker.finish(name)
    positions = [f.position for f in world.frames_of("r2") if isinstance(f, Queued)]
    assert positions == sorted(positions, reverse=True)


async def test_a_job_too_late_for_its_tier_is_refused() -> None:
    tiers = TierPolicies(free=TierPolicy(weight=1.0, ttft_bound_ms=5_000.0, shed=True))
    world = World(msgspec.structs.replace(CONFIG, tiers=tiers))
    await world.open()
    worker = await world.add_worker(num_slots=1)
    for number in range(8):
        late = job(f"r{number}", received_ns=world.clock.now_ns())
        await world.client.jobs.publish(late, reserved=True)
    for number in range(2):
        await world.until(lambda: bool(worker.running))
        await world.pass_s(2.0)
        await worker.finish(f"r{number}")
    published = [job(f"p{number}", received_ns=world.clock.now_ns()) for number in range(8)]
    for waiting in published:
        await world.client.jobs.publish(waiting)
    await world.until(lambda: any(isinstance(frame, Shed) for _, frame in world.frames))
    refused = next(name for name, frame in world.frames if isinstance(frame, Shed))
    await world.until(lambda: world.record(refused) is not None)
    record = world.record(refused)
    assert record is not None
    assert record.status is Status.SHED
    await world.pass_s(1.0)
    shed = {name for name, frame in world.frames if isinstance(frame, Shed)}
    assert not shed & {one.request_id for one in published}, "what a service publishes waits"
    await world.close()


async def test_one_tenant_may_not_fill_the_queue(world: World) -> None:
    world.schedulers[0].state.config = msgspec.structs.replace(CONFIG, max_queued_jobs=20)
    await world.add_worker(num_slots=1)
    for number in range(12):
        await world.client.jobs.publish(job(f"small-{number}", tenant="small"), reserved=True)
    for number in range(60):
        await world.client.jobs.publish(job(f"big-{number}", tenant="big"), reserved=True)
    await world.pass_s(3.0)
    shed = {name for name, frame in world.frames if isinstance(frame, Shed)}
    assert shed
    assert all(name.startswith("big-") for name in shed)
    assert world.num_stored <= 22


async def test_a_drained_worker_hands_its_streams_on(world: World) -> None:
    first = await world.add_worker("a")
    for number in range(3):
        await world.client.jobs.publish(job(f"r{number}"))
    await world.until(lambda: len(first.running) == 3)
    second = await world.add_worker("b", num_slots=2)
    first.draining = True
    await first.announce()
    await world.until(lambda: len(second.running) == 2)
    assert len(first.running) == 1, "for one there is no room elsewhere"
    moved = second.history[0]
    assert moved.epoch == 2
    (cancel,) = [c for c in first.cancels if c.request_id == moved.job.request_id]
    assert cancel.below_epoch == 2
    await second.finish(moved.job.request_id)
    await world.until(lambda: not first.running)
    fleet = world.schedulers[0].state.fleet
    view = fleet.get(first.worker_id)
    assert view is not None
    assert not view.runs


async def test_streams_leave_a_drained_worker_as_another_has_time_for_them(world: World) -> None:
    first = await world.add_worker("a", num_slots=8)
    first.device_us = 1  # so it tells of each run that leaves it
    for number in range(8):
        await world.client.jobs.publish(job(f"r{number}", prompt_token_ids=(1,) * 400))
    await world.until(lambda: len(first.running) == 8)
    # It never reports prompts that wait, so what it is believed to have is what was just sent.
    second = await world.add_worker("b", num_slots=8)
    first.draining = True
    await first.announce()
    await world.until(lambda: bool(second.running))
    assert len(second.running) < 8, "each would wait for those before it"
    seen = [len(second.running)]
    for _ in range(8):
        await second.announce()
        await world.pass_s(0.1)
        seen.append(len(second.running))
    assert seen[-1] == 8
    assert len(set(seen)) > 3, "a few at a time"
    assert not first.running


async def test_a_job_that_a_worker_returns_continues_elsewhere_at_once(world: World) -> None:
    first = await world.add_worker("a")
    await world.client.jobs.publish(job("r1"))
    await world.until(lambda: "r1" in first.running)
    first.draining = True
    await first.announce()
    await world.pass_s(1.0)
    await first.return_job("r1")
    await first.retire()
    second = await world.add_worker("b")
    await world.until(lambda: "r1" in second.running, within_s=2.0)
    await world.pass_s(8.0)
    await second.finish("r1")
    await world.until(lambda: world.num_stored == 0)
    assert world.record("r1") is not None
    assert len(second.history) <= 2


async def test_a_job_without_a_model_gets_one_once_for_all() -> None:
    route = Route(small="small", large="large")
    world = World(
        msgspec.structs.replace(CONFIG, models=("small", "large")),
        models=("small", "large"),
        router=Router({"auto": route}),
    )
    await world.open()
    small = await world.add_worker("s", model="small")
    large = await world.add_worker("l", model="large")
    await world.client.jobs.publish(job("r1", model="auto", prompt="hello", prompt_token_ids=None))
    await world.until(lambda: bool(small.running or large.running))
    (dispatch,) = [*small.running.values(), *large.running.values()]
    assert dispatch.job.model in ("small", "large")
    assert dispatch.job.model_requested == "auto"
    assert dispatch.job.route_reason
    owner = small if small.running else large
    await owner.finish("r1")
    await world.until(lambda: world.num_stored == 0)
    await world.close()


async def test_two_schedulers_share_the_work_and_lose_nothing(world: World) -> None:
    await world.add_scheduler()
    workers = [await world.add_worker(name, num_slots=2) for name in "ab"]
    names = [f"{tenant}-{number}" for number in range(20) for tenant in "xyz"]
    for name in names:
        await world.client.jobs.publish(job(name, tenant=name[0]))
    for _ in range(200):
        for worker in workers:
            await worker.finish_all()
        await world.pass_s(0.2)
        await asyncio.sleep(0)
        if world.num_stored == 0:
            break
    assert world.num_stored == 0
    assert all(world.record(name) is not None for name in names)
    ran = Counter(d.job.request_id for worker in workers for d in worker.history)
    assert set(ran) == set(names)
    for scheduler in world.schedulers:
        await world.until(lambda scheduler=scheduler: not len(scheduler.state.job_table))  # type: ignore[misc]
        check_integrity(scheduler.model_queues["m"].queue)
        check_integrity(scheduler.state.fleet)
