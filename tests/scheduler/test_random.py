"""Random faults of workers: each job is answered once and no epoch runs twice."""

from __future__ import annotations

import asyncio
import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millrace.schemas.control import Cancel, ResumePoint
from millrace.schemas.pooling import Pooling
from tests.scheduler.integrity import check_integrity
from tests.scheduler.scripted_worker import ScriptedWorker
from tests.scheduler.world import World, job

_NUM_JOBS = 30
_NUM_EVENTS = 60


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32))
def test_no_job_is_lost_and_none_answered_twice(seed: int) -> None:
    asyncio.run(_live_through(random.Random(seed)))


async def _live_through(draw: random.Random) -> None:
    world = World()
    await world.open()
    await world.client.control.serve_resume_points(
        "client", lambda _id: ResumePoint(token_ids=(4, 5)[: draw.randint(0, 2)])
    )
    if draw.random() < 0.5:
        await world.add_scheduler()
    fleet = [await world.add_worker(name, draw.randint(1, 4)) for name in "abc"]
    published = 0
    for _ in range(_NUM_EVENTS):
        index = draw.randrange(3)
        match draw.randrange(9):
            case 0 | 1 | 2:
                for _ in range(draw.randint(1, 3)):
                    if published < _NUM_JOBS:
                        pooling = draw.choice([None, None, Pooling.MEAN])
                        await world.client.jobs.publish(
                            job(f"r{published}", reply="client", pooling=pooling)
                        )
                        published += 1
            case 3 | 4:
                await _finish_some(fleet[index], draw)
            case 5:
                await _replace(world, fleet, index, draw)
            case 6:
                fleet[index].rejection = draw.choice(["", "full", "draining"])
            case 7:
                fleet[index].tells_ends = draw.random() < 0.5
            case 8:
                if published:
                    request_id = f"r{draw.randrange(published)}"
                    await world.client.control.cancel(Cancel(request_id=request_id))
        await world.pass_s(draw.choice([0.0, 0.05, 0.5, 1.0]))
        _check(world)
    await _let_all_finish(world, fleet)
    assert len(world.records()) == published
    assert {record.request_id for record in world.records()} == {
        f"r{number}" for number in range(published)
    }
    for scheduler in world.schedulers:
        await world.until(lambda scheduler=scheduler: len(scheduler.state.job_table) == 0, 60.0)  # type: ignore[misc]
    await world.close()


async def _finish_some(worker: ScriptedWorker, draw: random.Random) -> None:
    for request_id in list(worker.running):
        if draw.random() < 0.5:
            await worker.finish(request_id)


async def _replace(
    world: World, fleet: list[ScriptedWorker], index: int, draw: random.Random
) -> None:
    name = fleet[index].name
    if draw.random() < 0.3:
        await fleet[index].retire()
    else:
        await fleet[index].kill()
    await world.pass_s(draw.choice([0.0, 0.3, 3.0]))
    fleet[index] = await world.add_worker(name, draw.randint(1, 4))


async def _let_all_finish(world: World, fleet: list[ScriptedWorker]) -> None:
    for worker in fleet:
        worker.rejection = ""
    deadline_s = world.clock.monotonic() + 120.0
    while world.num_stored:
        assert world.clock.monotonic() < deadline_s, "a job is stuck"
        for worker in fleet:
            await worker.finish_all()
        await world.pass_s(0.25)
        _check(world)


def _check(world: World) -> None:
    runs = [(d.job.request_id, d.epoch) for w in world.workers for d in w.history]
    assert len(runs) == len(set(runs)), "two runs at one epoch"
    embeddings = [d for w in world.workers for d in w.history if d.job.pooling is not None]
    assert not any(d.resume_token_ids for d in embeddings), "tokens of an embedding"
    for scheduler in world.schedulers:
        check_integrity(scheduler.state.fleet)
