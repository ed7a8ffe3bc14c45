"""Starvation: a job that cannot be sent blocks only jobs that need the same resource."""

from __future__ import annotations

import msgspec

from millrace.schemas.jobs import Tier
from millrace.schemas.sampling import SamplingParams
from tests.scheduler.world import CONFIG, World, job

_LONG = {"prompt_token_ids": tuple(range(1, 641))}


async def test_a_job_that_waits_for_one_worker_does_not_keep_others_from_another(
    world: World,
) -> None:
    large = await world.add_worker("large", num_blocks=50, max_tokens=800)
    small = await world.add_worker("small", num_blocks=50, max_tokens=100)
    for number in range(2):
        await world.client.jobs.publish(job(f"big-{number}", **_LONG, tenant="big"))
    await world.until(lambda: "big-0" in large.running)
    await world.client.jobs.publish(job("r1", tenant="other"))
    await world.until(lambda: "r1" in small.running, within_s=2.0)
    assert "big-1" not in large.running
    await large.finish("big-0")
    await world.until(lambda: "big-1" in large.running)


async def test_a_worker_that_a_long_job_waits_for_is_left_to_it(world: World) -> None:
    """Small jobs that arrive continuously do not take the long job's blocks."""
    worker = await world.add_worker("a", num_slots=8, num_blocks=50)
    other = await world.add_worker("b", num_slots=2, num_blocks=50)
    for number in range(2):
        await world.client.jobs.publish(job(f"big-{number}", **_LONG, tenant="big"))
    await world.until(lambda: bool(worker.running) and bool(other.running))
    await world.client.jobs.publish(job("big-2", **_LONG, tenant="big"))
    await world.pass_s(1.0)
    for number in range(4):
        await world.client.jobs.publish(job(f"r{number}", tenant="other"))
    await world.pass_s(1.0)
    running = {**worker.running, **other.running}
    assert {"r0"} <= running.keys(), "one worker is kept, the other is not"
    await worker.finish(next(name for name in worker.running if name.startswith("big")))
    await other.finish(next(name for name in other.running if name.startswith("big")))
    await world.until(lambda: "big-2" in {**worker.running, **other.running})


async def test_the_streams_of_a_drained_worker_move_past_one_that_fits_nowhere(
    world: World,
) -> None:
    first = await world.add_worker("a", num_blocks=100)
    await world.client.jobs.publish(job("long", **_LONG))
    await world.until(lambda: "long" in first.running)
    for number in range(2):
        await world.client.jobs.publish(job(f"r{number}"))
    await world.until(lambda: len(first.running) == 3)
    second = await world.add_worker("b", num_blocks=50, max_tokens=100)
    first.draining, first.device_us = True, 1
    await first.announce()
    await world.until(lambda: {"r0", "r1"} <= second.running.keys(), within_s=2.0)
    assert "long" in first.running


async def test_a_full_window_of_one_tier_hides_no_job_of_a_higher_one() -> None:
    world = World(msgspec.structs.replace(CONFIG, window_jobs=4))
    await world.open()
    worker = await world.add_worker(num_slots=1)
    for number in range(9):
        await world.client.jobs.publish(job(f"free-{number}", tenant=f"t{number}"))
    await world.until(lambda: bool(worker.running))
    await world.pass_s(1.0)
    worker.num_slots = 2  # it would preempt one
    await world.client.jobs.publish(job("urgent", tenant="e", tier=Tier.ENTERPRISE))
    await world.until(lambda: "urgent" in worker.running, within_s=2.0)
    await world.close()


async def test_batch_work_that_waits_gives_newcomers_no_claim_on_the_past(world: World) -> None:
    """A new tier is lifted to the served tiers, with any batch work in the queue."""
    worker = await world.add_worker(num_slots=1)
    for number in range(4):
        await world.client.jobs.publish(job(f"batch-{number}", tenant="b", tier=Tier.BATCH))
    await world.until(lambda: bool(worker.running))
    long = SamplingParams(max_tokens=900, seed=1)
    for number in range(12):
        await world.client.jobs.publish(job(f"free-{number}", tenant="f", sampling=long))
    for _ in range(6):
        await worker.finish(next(iter(worker.running)))
        await world.until(lambda: bool(worker.running))
    for number in range(40):
        await world.client.jobs.publish(
            job(f"pro-{number}", tenant="p", tier=Tier.PRO, sampling=long)
        )
    start = len(worker.history)
    await world.pass_s(0.5)
    for _ in range(15):
        await worker.finish(next(iter(worker.running)))
        await world.until(lambda: bool(worker.running))
    tiers = [dispatch.job.tier for dispatch in worker.history[start:]]
    assert tiers.count(Tier.FREE) >= 2, "one in five, by weight"


async def test_a_restart_of_a_scheduler_changes_nobodys_turn(world: World) -> None:
    """The waiting jobs have run nowhere, so no stream was interrupted."""
    worker = await world.add_worker(num_slots=1)
    for number in range(9):
        await world.client.jobs.publish(job(f"heavy-{number}", tenant=f"h{number}"))
    await world.until(lambda: bool(worker.running))
    await world.pass_s(1.0)
    await world.stop_scheduler()
    await world.client.jobs.publish(job("urgent", tenant="e", tier=Tier.ENTERPRISE))
    await world.add_scheduler()
    await world.pass_s(2.0)
    start = len(worker.history)
    await worker.finish(next(iter(worker.running)))
    await world.until(lambda: len(worker.history) > start)
    assert worker.history[start].job.request_id == "urgent"
