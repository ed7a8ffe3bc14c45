"""Intervals at which a scheduler counts the queue and publishes its status."""

from __future__ import annotations

import pytest

from millrace.scheduler.stages.pull import JobPuller
from millrace.scheduler.state import SchedulerState
from tests.scheduler.world import CONFIG, World, job


async def test_a_queue_without_jobs_is_spoken_of_every_two_seconds() -> None:
    world = World(CONFIG)
    await world.open()
    await world.add_worker()
    await world.pass_s(2.0)
    num_before = len(world.statuses)
    await world.pass_s(20.0)
    assert len(world.statuses) - num_before == 10
    await world.close()


async def test_a_job_ends_the_rest_at_once() -> None:
    world = World(CONFIG)
    await world.open()
    worker = await world.add_worker()
    for number in range(3):
        await world.pass_s(2.0 + 0.3 * number)
        num_before = len(world.statuses)
        await world.client.jobs.publish(job(f"r{number}"))
        await world.pass_s(1.0)
        assert len(world.statuses) - num_before >= 4
        await worker.finish(f"r{number}")
    await world.close()


async def test_a_worker_that_comes_is_told_of_at_once() -> None:
    world = World(CONFIG)
    await world.open()
    await world.pass_s(2.5)
    assert world.statuses[-1].num_workers == 0
    await world.add_worker()
    await world.pass_s(0.3)
    assert world.statuses[-1].num_workers == 1
    await world.close()


async def test_a_job_that_was_not_announced_is_found_by_the_next_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(JobPuller, "published", lambda *_: None)
    monkeypatch.setattr(SchedulerState, "count_queue_soon", lambda *_: None)
    world = World(CONFIG)
    await world.open()
    worker = await world.add_worker()
    await world.pass_s(2.0)
    await world.client.jobs.publish(job("r1"))
    await world.until(lambda: "r1" in worker.running, within_s=2.3)
    await world.close()
