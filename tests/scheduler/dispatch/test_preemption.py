"""Preemption: a job without room does not block a higher tier that may preempt others."""

from __future__ import annotations

import pytest

from millrace.scheduler.jobs.scheduled_job import ScheduledJob, Tenant
from millrace.scheduler.queues.fair_queue import FairQueue
from millrace.schemas.config import SchedulerConfig
from millrace.schemas.control import Dispatch, WorkerReply
from millrace.schemas.jobs import Tier
from tests.scheduler.integrity import check_integrity
from tests.scheduler.scheduled_jobs import scheduled_job
from tests.scheduler.scripted_worker import ScriptedWorker
from tests.scheduler.world import World, job


def queue_of(*scheduled_jobs: ScheduledJob) -> FairQueue:
    queue = FairQueue(SchedulerConfig())
    for one in scheduled_jobs:
        queue.push(one)
    return queue


@pytest.mark.parametrize("interrupted", [False, True])
def test_the_head_of_the_tiers_above_one(interrupted: bool) -> None:
    free = scheduled_job("f", interrupted=interrupted)
    pro = scheduled_job("p", Tier.PRO)
    enterprise = scheduled_job("e", Tier.ENTERPRISE)
    queue = queue_of(free, scheduled_job("b", Tier.BATCH), pro, enterprise)
    queue.charge(pro.tenant, 100.0)
    queue.charge(enterprise.tenant, 1_000.0)
    assert queue.head() is free
    assert queue.head(Tier.FREE) is pro
    assert queue.head(Tier.PRO) is enterprise
    assert queue.head(Tier.ENTERPRISE) is None


def test_a_lead_is_by_weight_over_where_a_tier_would_begin() -> None:
    free = scheduled_job("f")
    queue = queue_of(free, scheduled_job("p", Tier.PRO), scheduled_job("e", Tier.ENTERPRISE))
    queue.charge(Tenant(Tier.PRO, "p"), 100.0)
    queue.charge(Tenant(Tier.ENTERPRISE, "e"), 1_000.0)
    assert queue.lead(Tier.ENTERPRISE, over=Tier.FREE) == pytest.approx(1_000.0 / 8)
    queue.remove(free)
    assert queue.lead(Tier.ENTERPRISE, over=Tier.FREE) == pytest.approx(1_000.0 / 8 - 100.0 / 4)


def test_an_interrupted_job_is_skipped_at_any_position() -> None:
    free, pro = scheduled_job("f", interrupted=True), scheduled_job("p", Tier.PRO, interrupted=True)
    queue = queue_of(free, pro)
    assert queue.head(Tier.FREE) is pro
    queue.pass_over(pro)
    assert queue.head(Tier.FREE) is None
    assert queue.head() is free
    queue.restore_passed()
    assert queue.head(Tier.FREE) is pro
    check_integrity(queue)


class PreemptingWorker(ScriptedWorker):
    """Takes a higher tier beyond its slots, for which others make way."""

    async def _on_dispatch(self, dispatch: Dispatch) -> WorkerReply:
        if dispatch.job.tier is not Tier.ENTERPRISE:
            return await super()._on_dispatch(dispatch)
        self.running[dispatch.job.request_id] = dispatch
        self.history.append(dispatch)
        return WorkerReply(ok=True)


async def full_of_free_work(world: World, num_slots: int = 4) -> PreemptingWorker:
    """A worker without a slot, and one job that waits for it."""
    worker = PreemptingWorker(world.client, world.clock, num_slots=num_slots)
    worker.decode_step_ms = 20.0
    world.workers.append(worker)
    await worker.start()
    for number in range(num_slots + 3):
        await world.client.jobs.publish(job(f"free-{number}", tenant="f"))
    await world.until(lambda: len(worker.running) == num_slots)
    return worker


async def test_a_free_job_without_room_holds_up_no_enterprise_job(world: World) -> None:
    worker = await full_of_free_work(world)
    for number in range(8):
        name = f"urgent-{number}"
        await world.client.jobs.publish(job(name, tenant="e", tier=Tier.ENTERPRISE))
        await world.until(lambda name=name: name in worker.running, within_s=0.2)  # type: ignore[misc]
        await worker.finish(name)
        await world.pass_s(0.5)
    assert sum(d.job.tier is Tier.FREE for d in worker.history) == 4, "none of them had room"
    check_integrity(world.schedulers[0].model_queues["m"].queue)


async def test_an_interrupted_stream_without_room_holds_up_no_enterprise_job(world: World) -> None:
    other = await world.add_worker("other", num_slots=2)
    await world.client.jobs.publish(job("stream", tenant="s"))
    await world.until(lambda: "stream" in other.running)
    worker = PreemptingWorker(world.client, world.clock, "w", num_slots=1)
    world.workers.append(worker)
    await worker.start()
    await world.client.jobs.publish(job("r1", tenant="f"))
    await world.until(lambda: "r1" in worker.running)
    await other.kill()
    await world.until(lambda: len(world.schedulers[0].model_queues["m"].queue) == 1)
    await world.client.jobs.publish(job("urgent", tenant="e", tier=Tier.ENTERPRISE))
    await world.until(lambda: "urgent" in worker.running, within_s=1.0)
    assert "stream" not in worker.running


async def test_a_long_free_job_that_a_worker_is_kept_for_holds_up_no_enterprise_job(
    world: World,
) -> None:
    worker = PreemptingWorker(world.client, world.clock, num_slots=8, num_blocks=50)
    world.workers.append(worker)
    await worker.start()
    long = {"prompt_token_ids": tuple(range(1, 641))}
    for number in range(2):
        await world.client.jobs.publish(job(f"big-{number}", **long, tenant="big"))
    await world.until(lambda: "big-0" in worker.running)
    for number in range(5):
        name = f"urgent-{number}"
        await world.client.jobs.publish(job(name, tenant="e", tier=Tier.ENTERPRISE))
        await world.until(lambda name=name: name in worker.running, within_s=0.2)  # type: ignore[misc]
        await worker.finish(name)
        await world.pass_s(0.5)
    assert list(worker.running) == ["big-0"]
    await worker.finish("big-0")
    await world.until(lambda: "big-1" in worker.running)


async def test_a_flood_of_a_higher_tier_is_held_back_until_the_lower_was_served(
    world: World,
) -> None:
    """Jobs of 3 + 2 * 16 tokens, for an eighth each. What waits is worth one job, and what runs
    makes 4 tokens in 20 ms."""
    worker = await full_of_free_work(world)
    for number in range(200):
        urgent = job(f"urgent-{number}", tenant="e", tier=Tier.ENTERPRISE)
        await world.client.jobs.publish(urgent)

    async def end_those_of_the_higher_tier() -> int:
        for name in [name for name in worker.running if name.startswith("urgent")]:
            await worker.finish(name)
        await world.pass_s(0.01)
        return sum(d.job.tier is Tier.ENTERPRISE for d in worker.history)

    begun_s = world.clock.monotonic()
    counts = [await end_those_of_the_higher_tier() for _ in range(40)]
    passed_s = world.clock.monotonic() - begun_s
    # Two slots of four at least: what the flood gets is to be eight times what free work gets.
    at_most = 8 * (35 + 2 * 4 * (passed_s + 1.0) / 0.02) / 35
    assert 8 < counts[-1] <= at_most
    assert counts[-1] < 200
