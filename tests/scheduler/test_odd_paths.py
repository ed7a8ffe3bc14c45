"""Jobs that are delivered, pulled or counted in odd moments."""

from __future__ import annotations

import pytest

from bus.api import LeasedJob, Line
from scheduler.entry import State
from scheduler.scheduler import Scheduler
from schemas.errors import BusUnavailableError
from tests.scheduler.world import LINE, World, job


def redelivered(scheduler: Scheduler, request_id: str) -> LeasedJob:
    """A job that the scheduler has, as the queue would deliver it once more."""
    entry = scheduler.parts.table.get(request_id)
    assert entry is not None
    return LeasedJob(
        job=entry.job,
        lease=entry.lease,
        num_deliveries=entry.num_deliveries + 1,
        stream_sequence=entry.stream_sequence,
        line=entry.line,
    )


async def test_a_pull_that_failed_says_nothing_of_the_queue(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = world.schedulers[0].parts.bus.jobs
    pull, failures = jobs.pull, [BusUnavailableError("away")]

    async def failing(line: Line, max_jobs: int, timeout_s: float) -> list[LeasedJob]:
        if failures:
            await world.clock.sleep(1.0)
            raise failures.pop()
        return await pull(line, max_jobs, timeout_s)

    monkeypatch.setattr(jobs, "pull", failing)
    worker = await world.add_worker(num_slots=10)
    for number in range(10):
        await world.client.jobs.publish(job(f"r{number}"))
    await world.until(lambda: len(worker.running) == 10, within_s=3.0)


async def test_a_line_that_others_let_go_of_is_pulled_without_delay(world: World) -> None:
    """What was thought to be another's is not, once one of it was found."""
    scheduler = world.schedulers[0]
    for number in range(10):
        await world.client.jobs.publish(job(f"r{number}"))
    others = await world.client.jobs.pull(LINE, 10, 0.0)
    worker = await world.add_worker(num_slots=10)
    await world.pass_s(2.0)
    assert not worker.running
    for leased in others:
        await world.client.jobs.release(leased.lease)
    await world.until(lambda: len(worker.running) == 10, within_s=3.0)
    scheduler.parts.fleet.check_integrity()


async def test_a_job_that_ends_as_it_is_delivered_again_is_over(world: World) -> None:
    worker = await world.add_worker()
    await world.client.jobs.publish(job("r1"))
    await world.until(lambda: "r1" in worker.running)
    scheduler = world.schedulers[0]
    entry = scheduler.parts.table.get("r1")
    assert entry is not None
    await world.until(lambda: entry.state is State.RUNNING)
    scheduler.intakes["m"].admit(redelivered(scheduler, "r1"))
    await worker.finish("r1")
    await world.pass_s(0.5)
    view = scheduler.parts.fleet.get(worker.worker_id)
    assert view is not None
    await world.until(lambda: not len(scheduler.parts.table))
    assert not view.runs, "nobody keeps room for it"


async def test_a_job_whose_worker_goes_as_it_is_delivered_again_runs_once(world: World) -> None:
    first = await world.add_worker("a")
    await world.client.jobs.publish(job("r1"))
    await world.until(lambda: "r1" in first.running)
    second = await world.add_worker("b")
    scheduler = world.schedulers[0]
    entry = scheduler.parts.table.get("r1")
    assert entry is not None
    await world.until(lambda: entry.state is State.RUNNING)
    scheduler.intakes["m"].admit(redelivered(scheduler, "r1"))
    scheduler._on_status(first.status(retired=True))
    await first.kill()
    await world.until(lambda: "r1" in second.running)
    await world.pass_s(1.0)
    assert len(second.history) == 1
    assert scheduler.lanes["m"].num_here(is_batch=False) == 0
    scheduler.lanes["m"].queue.check_integrity()
