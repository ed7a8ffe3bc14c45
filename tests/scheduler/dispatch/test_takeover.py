"""A worker and its scheduler die together: the next scheduler does not wait for their leases."""

from __future__ import annotations

from millrace.bus.running_requests import RunningRequest
from tests.scheduler.scripted_worker import ScriptedWorker
from tests.scheduler.world import World, job


async def _fill(world: World, worker: ScriptedWorker, num_jobs: int) -> None:
    for number in range(num_jobs):
        await world.client.jobs.publish(job(f"r{number}"))
    await world.until(lambda: len(worker.running) == num_jobs)
    _note_in_index(world, worker)


def _note_in_index(world: World, worker: ScriptedWorker) -> None:
    leases: dict[str, str] = {}
    for request_id, dispatch in worker.running.items():
        leases[request_id] = dispatch.lease
        world.running_requests.known[request_id] = RunningRequest(
            worker_id=worker.worker_id, epoch=dispatch.epoch, finished=False
        )
    world.running_requests.held[worker.worker_id] = leases


async def test_jobs_of_a_worker_that_died_with_the_scheduler_go_on_in_two_seconds(
    world: World,
) -> None:
    worker = await world.add_worker("a")
    await _fill(world, worker, 3)
    await world.pass_s(1.9)  # so the leases are new
    await world.kill_scheduler()
    await worker.kill()
    second = await world.add_worker("b")
    await world.pass_s(0.2)
    await world.add_scheduler()
    await world.until(lambda: len(second.running) == 3, within_s=2.6)
    assert {dispatch.epoch for dispatch in second.history} == {65}, "a delivery of its own"


async def test_a_silence_before_the_scheduler_came_counts_for_half_of_it(world: World) -> None:
    worker = await world.add_worker("a")
    await _fill(world, worker, 1)
    await world.pass_s(1.9)
    await world.kill_scheduler()
    await worker.kill()
    second = await world.add_worker("b")
    await world.pass_s(3.0)
    await world.add_scheduler()
    await world.pass_s(0.7)
    assert not second.running, "it might be heard yet"
    await world.until(lambda: "r0" in second.running, within_s=0.9)


async def test_no_lease_is_taken_from_a_live_worker(world: World) -> None:
    worker = await world.add_worker("a")
    await _fill(world, worker, 2)
    await world.kill_scheduler()
    second = await world.add_worker("b")
    await world.add_scheduler()
    await world.pass_s(5.0)
    assert len(worker.running) == 2
    assert not second.history
    assert {dispatch.epoch for dispatch in worker.history} == {1}


async def test_leases_of_taken_over_or_answered_jobs_are_left_alone(world: World) -> None:
    worker = await world.add_worker("a")
    await _fill(world, worker, 3)
    await world.kill_scheduler()
    await worker.kill()
    known = world.running_requests.known
    known["r0"] = RunningRequest(worker_id="elsewhere", epoch=2, finished=False)
    known["r1"] = RunningRequest(worker_id=worker.worker_id, epoch=1, finished=True)
    second = await world.add_worker("b")
    await world.add_scheduler()
    await world.until(lambda: bool(second.running), within_s=2.8)
    await world.pass_s(0.5)
    assert list(second.running) == ["r2"]


async def test_without_an_index_the_leases_lapse(world: World) -> None:
    worker = await world.add_worker("a")
    await _fill(world, worker, 1)
    await world.kill_scheduler()
    await worker.kill()
    world.running_requests.held.clear()
    second = await world.add_worker("b")
    await world.add_scheduler()
    await world.pass_s(3.0)
    assert not second.running
    await world.until(lambda: "r0" in second.running, within_s=6.0)
