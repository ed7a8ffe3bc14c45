"""Worker with a dead engine: its streams continue elsewhere if there is room."""

from __future__ import annotations

from millrace.schemas.control import ResumePoint
from millrace.schemas.pooling import Pooling
from tests.scheduler.scripted_worker import ScriptedWorker
from tests.scheduler.world import World, job


async def _fill(world: World, worker: ScriptedWorker, *request_ids: str) -> None:
    for request_id in request_ids:
        await world.client.jobs.publish(job(request_id))
    await world.until(lambda: set(worker.running) >= set(request_ids))


async def _lose_engine(worker: ScriptedWorker) -> None:
    worker.engine_down = True
    await worker.announce()


async def test_streams_leave_at_once_as_far_as_there_is_room(world: World) -> None:
    points = {f"r{number}": ResumePoint(token_ids=(9, 8, number)) for number in range(3)}
    await world.client.control.serve_resume_points("client", points.get)
    first = await world.add_worker("a")
    await _fill(world, first, "r0", "r1", "r2")
    second = await world.add_worker("b", num_slots=2)
    await _lose_engine(first)
    await world.until(lambda: len(second.running) == 2)
    assert len(first.running) == 1, "for one there is no room elsewhere"
    for moved in second.history:
        assert moved.epoch == 2
        assert moved.resume_token_ids == points[moved.job.request_id].token_ids
        (cancel,) = [one for one in first.cancels if one.request_id == moved.job.request_id]
        assert cancel.below_epoch == 2
    await second.finish(second.history[0].job.request_id)
    await world.until(lambda: not first.running)


async def test_without_another_worker_all_stay_and_new_jobs_wait(world: World) -> None:
    first = await world.add_worker("a")
    await _fill(world, first, "r1")
    await _lose_engine(first)
    await world.client.jobs.publish(job("later"))
    await world.pass_s(3.0)
    assert list(first.running) == ["r1"]
    first.engine_down = False
    await first.announce()
    await world.until(lambda: "later" in first.running, within_s=0.3)
    assert {dispatch.epoch for dispatch in first.history} == {1}


async def test_a_job_without_a_listener_stays_with_its_tokens(world: World) -> None:
    first = await world.add_worker("a")
    await world.client.jobs.publish(job("quiet", reply="", store_result=True))
    await world.client.jobs.publish(job("vector", pooling=Pooling.MEAN))
    await world.until(lambda: len(first.running) == 2)
    second = await world.add_worker("b")
    await _lose_engine(first)
    await world.until(lambda: "vector" in second.running)
    await world.pass_s(2.0)
    assert list(first.running) == ["quiet"]


async def test_a_suspect_of_two_engine_deaths_stays_with_the_second(world: World) -> None:
    read: dict[str, tuple[int, ...]] = {"bad": (), "good": ()}
    await world.client.control.serve_resume_points(
        "client", lambda name: ResumePoint(token_ids=read[name])
    )
    first = await world.add_worker("a")
    await _fill(world, first, "bad", "good")
    second = await world.add_worker("b")
    await _lose_engine(first)
    await world.until(lambda: len(second.running) == 2)
    first.engine_down = False
    await first.announce()
    read["good"] = (1,)  # it has got on, so it is not to blame
    await _lose_engine(second)
    await world.until(lambda: list(first.running) == ["good"])
    await world.pass_s(2.0)
    assert list(second.running) == ["bad"]
    assert first.running["good"].resume_token_ids == (1,)
