"""The priority of jobs, from the queue to a worker that is busy all the time."""

from __future__ import annotations

import msgspec

from tests.scheduler.scripted_worker import ScriptedWorker
from tests.scheduler.world import CONFIG, World, job


async def started_in_turn(world: World, worker: ScriptedWorker) -> list[str]:
    """The jobs in the order in which the worker, which has one slot, gets them."""
    while worker.running:
        num_started = len(worker.history)
        await worker.finish(next(iter(worker.running)))
        while len(worker.history) == num_started and world.num_stored:
            await world.pass_s(0.1)
    return [one.job.request_id for one in worker.history]


async def test_a_tenants_jobs_go_by_priority_and_another_tenant_keeps_its_turns() -> None:
    world = World(msgspec.structs.replace(CONFIG, window_jobs_per_tenant=8))
    await world.open()
    worker = await world.add_worker(num_slots=1)
    await world.client.jobs.publish(job("first", tenant="x"))
    await world.until(lambda: bool(worker.running))
    for name, priority in (("a-low", 9), ("a-usual", 0), ("a-high", -9), ("a-late", 1)):
        await world.client.jobs.publish(job(name, tenant="a", priority=priority))
    for name in ("b-1", "b-2", "b-3"):
        await world.client.jobs.publish(job(name, tenant="b"))
    await world.pass_s(1.0)
    started = await started_in_turn(world, worker)
    assert [name for name in started if name.startswith("a")] == [
        *("a-high", "a-usual", "a-late", "a-low")
    ]
    tenants = [name[0] for name in started[1:]]
    assert tenants[:6] in (["a", "b"] * 3, ["b", "a"] * 3)
    await world.close()


async def test_jobs_in_the_queue_are_pulled_in_order_of_arrival(world: World) -> None:
    """The scheduler pulls two jobs of a tenant besides the jobs that it sends."""
    worker = await world.add_worker(num_slots=1)
    for number in range(6):
        await world.client.jobs.publish(job(f"r{number}", priority=-number))
        await world.pass_s(0.5)
    assert await started_in_turn(world, worker) == ["r0", "r2", "r3", "r4", "r1", "r5"]
