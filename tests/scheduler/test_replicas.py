"""Several schedulers that share the work as one would, by publishing each tenant's service."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.scheduler.scripted_worker import ScriptedWorker
from tests.scheduler.world import World, job

_NUM_JOBS = {"heavy": 400, "light": 100}


async def backlog(world: World) -> list[ScriptedWorker]:
    """Publish a backlog with four times as many jobs of one tenant as of the other."""
    workers = [await world.add_worker(name) for name in "ab"]
    for number in range(max(_NUM_JOBS.values())):
        for tenant, count in _NUM_JOBS.items():
            if number < count:
                await world.client.jobs.publish(job(f"{tenant}-{number}", tenant=tenant))
    return workers


async def serve(world: World, workers: list[ScriptedWorker], num_jobs: int) -> Counter[str]:
    """Let so many more end, a few at a time; how many of each tenant did."""
    ended: Counter[str] = Counter()
    while ended.total() < num_jobs:
        for worker in workers:
            for request_id in list(worker.running)[:2]:
                ended[worker.running[request_id].job.tenant] += 1
                await worker.finish(request_id)
        await world.pass_s(0.1)
    return ended


@pytest.mark.parametrize("num_schedulers", [1, 2, 3])
async def test_shares_stay_equal_whoever_sends(world: World, num_schedulers: int) -> None:
    for _ in range(num_schedulers - 1):
        await world.add_scheduler()
    workers = await backlog(world)
    ended = await serve(world, workers, 120)
    assert abs(ended["heavy"] - ended["light"]) <= 16, "what can run at a time, twice"


async def test_shares_stay_equal_while_a_scheduler_is_killed_and_comes_back(world: World) -> None:
    await world.add_scheduler()
    workers = await backlog(world)
    before = await serve(world, workers, 48)
    await world.kill_scheduler(0)
    meanwhile = await serve(world, workers, 48)
    await world.add_scheduler()
    after = await serve(world, workers, 48)
    for ended in (before, meanwhile, after):
        assert abs(ended["heavy"] - ended["light"]) <= 16
    total = before + meanwhile + after
    assert abs(total["heavy"] - total["light"]) <= 24
