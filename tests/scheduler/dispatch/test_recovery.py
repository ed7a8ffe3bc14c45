"""Deaths of workers, schedulers and the broker: every job continues, and none runs twice."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from millrace.bus.running_requests import RunningRequest
from millrace.scheduler.jobs.scheduled_job import ScheduledJob
from millrace.scheduler.stages import send
from millrace.scheduler.state import SchedulerState
from millrace.schemas.control import Cancel, CancelReason, ResumePoint
from millrace.schemas.frames import Cancelled, Done, Failed
from millrace.schemas.pooling import Pooling
from millrace.schemas.records import Status
from tests.scheduler.world import CONFIG, World, job


async def test_a_silent_worker_s_jobs_go_to_another_within_the_timeout(world: World) -> None:
    first = await world.add_worker("a")
    for number in range(3):
        await world.client.jobs.publish(job(f"r{number}"))
    await world.until(lambda: len(first.running) == 3)
    await first.kill()
    second = await world.add_worker("b")
    await world.until(lambda: len(second.running) == 3, within_s=2.5)
    assert [dispatch.job.request_id for dispatch in second.history] == ["r0", "r1", "r2"]
    assert {dispatch.epoch for dispatch in second.history} == {2}
    await second.finish_all()
    await world.until(lambda: isinstance(world.terminal("r0"), Done))
    assert world.num_stored == 0


async def test_a_new_life_of_the_name_ends_the_former_at_once(world: World) -> None:
    first = await world.add_worker("a")
    await world.client.jobs.publish(job("r1"))
    await world.until(lambda: "r1" in first.running)
    await first.kill()
    await world.pass_s(0.1)
    second = await world.add_worker("a")
    await world.until(lambda: "r1" in second.running, within_s=0.3)
    assert second.running["r1"].epoch == 2


async def test_a_retired_worker_s_jobs_go_on_at_once(world: World) -> None:
    first, second = await world.add_worker("a"), await world.add_worker("b")
    second.rejection = "full"
    await world.client.jobs.publish(job("r1"))
    await world.until(lambda: "r1" in first.running)
    second.rejection = ""
    await world.pass_s(0.6)
    await first.retire()
    await world.until(lambda: "r1" in second.running, within_s=0.3)


async def test_a_zombie_is_superseded_before_the_next_run(world: World) -> None:
    zombie = await world.add_worker("a")
    await world.client.jobs.publish(job("r1"))
    await world.until(lambda: "r1" in zombie.running)
    for task in zombie._tasks:
        task.cancel()
    second = await world.add_worker("b")
    await world.until(lambda: "r1" in second.running)
    assert not zombie.running
    superseded = [cancel for cancel in zombie.cancels if cancel.request_id == "r1"]
    assert [cancel.reason for cancel in superseded] == [CancelReason.SUPERSEDED]
    assert superseded[0].below_epoch == second.running["r1"].epoch == 2


async def test_the_next_run_goes_on_where_the_client_is(world: World) -> None:
    points = {"r1": ResumePoint(token_ids=(9, 8, 7)), "gone": ResumePoint(open=False)}
    await world.client.control.serve_resume_points("client", points.get)
    first = await world.add_worker("a")
    for request_id in ("r1", "gone", "unknown"):
        await world.client.jobs.publish(job(request_id))
    await world.until(lambda: len(first.running) == 3)
    await first.kill()
    second = await world.add_worker("a")
    await world.until(lambda: len(second.running) == 2 and world.num_stored == 2)
    assert second.running["r1"].resume_token_ids == (9, 8, 7)
    assert second.running["unknown"].resume_token_ids == ()
    assert isinstance(world.terminal("gone"), Cancelled)
    record = world.record("gone")
    assert record is not None
    assert record.status is Status.CANCELLED


async def test_the_next_run_of_an_embedding_begins_anew(world: World) -> None:
    point = ResumePoint(token_ids=(9,))
    await world.client.control.serve_resume_points("client", lambda _id: point)
    first = await world.add_worker("a")
    await world.client.jobs.publish(job("r1", pooling=Pooling.MEAN))
    await world.until(lambda: "r1" in first.running)
    await first.kill()
    second = await world.add_worker("a")
    await world.until(lambda: "r1" in second.running)
    assert second.running["r1"].resume_token_ids == ()
    assert second.running["r1"].job.pooling is Pooling.MEAN


async def test_a_job_cancelled_while_its_worker_died_ends_as_cancelled(world: World) -> None:
    worker = await world.add_worker("a")
    await world.client.jobs.publish(job("r1"))
    await world.until(lambda: "r1" in worker.running)
    await worker.kill()
    await world.client.control.cancel(Cancel(request_id="r1"))
    await world.until(lambda: world.num_stored == 0)
    assert isinstance(world.terminal("r1"), Cancelled)


async def test_a_cancel_that_overtook_the_dispatch_reaches_the_worker(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await world.add_worker()
    accepted = send.accepted

    def cancel_first(state: SchedulerState, scheduled: ScheduledJob) -> None:
        state.cancels.add(Cancel(request_id="r1"), 0.0)
        accepted(state, scheduled)

    monkeypatch.setattr(send, "accepted", cancel_first)
    await world.client.jobs.publish(job("r1"))
    await world.until(lambda: [cancel.request_id for cancel in worker.cancels] == ["r1"])


async def test_no_answer_counts_as_a_run_that_may_have_begun(world: World) -> None:
    deaf = await world.add_worker("a")
    deaf.mute = True
    await world.client.jobs.publish(job("r1"))
    await world.until(lambda: any(e.attempts.num_lost for e in world.schedulers[0].state.job_table))
    deaf.mute = False
    await world.until(lambda: "r1" in deaf.running)
    assert deaf.running["r1"].epoch >= 2


async def test_attempts_are_bounded(world: World) -> None:
    world.schedulers[0].state.config = msgspec.structs.replace(CONFIG, max_attempts=3)
    read: list[int] = []
    await world.client.control.serve_resume_points(
        "client", lambda _id: ResumePoint(token_ids=tuple(read))
    )
    for number in range(3):
        read.append(number)  # it gets on each time, so it is not to blame
        worker = await world.add_worker("a")
        if number == 0:
            await world.client.jobs.publish(job("r1", store_result=True))
        await world.until(lambda worker=worker: "r1" in worker.running)  # type: ignore[misc]
        await worker.kill()
    await world.until(lambda: world.num_stored == 0)
    record = world.record("r1")
    assert record is not None
    assert (record.status, record.error_code) == (Status.FAILED, "too_many_attempts")
    assert [dead.reason for dead in world.broker.dead] == ["too_many_attempts"]
    result = await world.client.results.fetch("local", "r1")
    assert result is not None
    assert result.status == "failed"


async def test_a_job_that_kills_its_workers_is_not_run_a_third_time(world: World) -> None:
    await world.client.control.serve_resume_points("client", lambda _id: ResumePoint())
    await world.client.jobs.publish(job("bad"))
    for _ in range(2):
        worker = await world.add_worker("a")
        await world.until(lambda worker=worker: "bad" in worker.running)  # type: ignore[misc]
        await worker.kill()
    worker = await world.add_worker("a")
    await world.until(lambda: world.num_stored == 0)
    assert not worker.history
    record, frame = world.record("bad"), world.terminal("bad")
    assert record is not None
    assert (record.status, record.error_code) == (Status.FAILED, "poison")
    assert isinstance(frame, Failed)
    assert (frame.code, frame.retryable) == ("poison", False)
    assert [dead.reason for dead in world.broker.dead] == ["poison"]


async def test_jobs_that_live_through_deaths_are_not_blamed(world: World) -> None:
    read = {"bad": 0, "good": 1}
    await world.client.control.serve_resume_points(
        "client", lambda name: ResumePoint(token_ids=tuple(range(read[name])))
    )
    for name in read:
        await world.client.jobs.publish(job(name))
    for _ in range(2):
        worker = await world.add_worker("a")
        await world.until(lambda worker=worker: len(worker.running) == 2)  # type: ignore[misc]
        await worker.kill()
        read["good"] += 1
    worker = await world.add_worker("a")
    await world.until(lambda: world.terminal("bad") is not None)
    await world.until(lambda: "good" in worker.running)
    assert worker.running["good"].resume_token_ids == (0, 1, 2)
    assert [dead.request_id for dead in world.broker.dead] == ["bad"]


async def test_giving_up_says_that_asking_again_may_help(world: World) -> None:
    world.schedulers[0].state.config = msgspec.structs.replace(CONFIG, max_attempts=1)
    worker = await world.add_worker("a")
    await world.client.jobs.publish(job("r1"))
    await world.until(lambda: "r1" in worker.running)
    await worker.kill()
    await world.until(lambda: world.num_stored == 0)
    frame = world.terminal("r1")
    assert isinstance(frame, Failed)
    assert frame.retryable


async def test_when_scheduler_and_worker_die_another_scheduler_goes_on(world: World) -> None:
    worker = await world.add_worker("a")
    await world.client.jobs.publish(job("r1"))
    await world.until(lambda: "r1" in worker.running)
    await world.kill_scheduler()
    await worker.kill()
    await world.add_scheduler()
    second = await world.add_worker("b")
    await world.until(lambda: "r1" in second.running, within_s=7.0)
    assert second.running["r1"].epoch == 65


async def test_a_redelivered_job_that_is_answered_is_not_run_again(world: World) -> None:
    worker = await world.add_worker("a")
    await world.client.jobs.publish(job("r1"))
    await world.until(lambda: "r1" in worker.running)
    await world.kill_scheduler()
    await worker.kill()
    world.running_requests.known["r1"] = RunningRequest(worker_id="a", epoch=1, finished=True)
    await world.add_scheduler()
    second = await world.add_worker("b")
    await world.until(lambda: world.num_stored == 0, within_s=7.0)
    assert not second.history


async def test_a_redelivered_job_goes_on_at_the_worker_that_has_it(world: World) -> None:
    worker = await world.add_worker("a")
    await world.client.jobs.publish(job("r1"))
    await world.until(lambda: "r1" in worker.running)
    await world.kill_scheduler()
    worker._tasks[1].cancel()
    world.running_requests.known["r1"] = RunningRequest(
        worker_id=worker.worker_id, epoch=70, finished=False
    )
    await world.add_worker("b")
    await world.add_scheduler()
    await world.until(lambda: worker.running["r1"].epoch > 1, within_s=7.0)
    assert worker.running["r1"].epoch == 71
    assert not [cancel for cancel in worker.cancels if cancel.request_id == "r1"]


async def test_a_lease_that_lapsed_here_goes_on_under_the_new_one(world: World) -> None:
    worker = await world.add_worker("a")
    await world.client.jobs.publish(job("r1"))
    await world.until(lambda: "r1" in worker.running)
    worker._tasks[1].cancel()
    await world.until(lambda: worker.running["r1"].epoch == 66, within_s=7.0)
    assert worker.running["r1"].lease.split(".")[1] == "2"


async def test_a_redelivered_job_whose_client_left_stops_where_it_runs(world: World) -> None:
    await world.client.control.serve_resume_points("client", lambda _id: ResumePoint(open=False))
    worker = await world.add_worker("a")
    await world.client.jobs.publish(job("r1"))
    await world.until(lambda: "r1" in worker.running)
    worker._tasks[1].cancel()
    await world.until(lambda: isinstance(world.terminal("r1"), Cancelled), within_s=7.0)
    assert not worker.running
    assert world.num_stored == 0


async def test_a_lost_notice_leaks_nothing(world: World) -> None:
    worker = await world.add_worker(num_slots=2)
    worker.tells_ends = False
    for number in range(4):
        await world.client.jobs.publish(job(f"r{number}"))
    await world.until(lambda: len(worker.running) == 2)
    await world.pass_s(1.0)
    await worker.finish_all()
    await world.until(lambda: set(worker.running) == {"r2", "r3"}, within_s=5.0)
    job_table = world.schedulers[0].state.job_table
    assert {scheduled.request_id for scheduled in job_table} == {"r2", "r3"}


async def test_an_answered_job_is_not_run_again_when_its_worker_dies(world: World) -> None:
    first = await world.add_worker("a")
    first.tells_ends = False
    await world.client.jobs.publish(job("r1"))
    await world.until(lambda: "r1" in first.running)
    await first.finish("r1")
    await first.kill()
    second = await world.add_worker("a")
    await world.until(lambda: len(world.schedulers[0].state.job_table) == 0)
    assert not second.history


async def test_an_outage_of_the_bus_kills_no_worker(world: World) -> None:
    worker = await world.add_worker("a")
    await world.client.jobs.publish(job("r1"))
    await world.client.jobs.publish(job("r2"))
    await world.until(lambda: len(worker.running) == 2)
    world.broker.stop()
    await world.pass_s(4.0)
    world.broker.start()
    await world.pass_s(1.0)
    assert world.schedulers[0].state.fleet.get(worker.worker_id) is not None
    await worker.finish_all()
    await world.until(lambda: world.num_stored == 0)
    assert [dispatch.epoch for dispatch in worker.history] == [1, 1]
    await world.client.jobs.publish(job("r3"))
    await world.until(lambda: "r3" in worker.running)


async def test_two_schedulers_share_the_jobs_of_one_worker(world: World) -> None:
    await world.add_scheduler()
    worker = await world.add_worker(num_slots=4)
    for number in range(20):
        await world.client.jobs.publish(job(f"r{number}"))
    for _ in range(40):
        if world.num_stored == 0:
            break
        await world.until(lambda: bool(worker.running))
        await worker.finish_all()
        await world.pass_s(0.1)
    assert world.num_stored == 0
    assert sorted(d.job.request_id for d in worker.history) == sorted(f"r{n}" for n in range(20))


async def test_two_schedulers_and_a_dying_worker(world: World) -> None:
    other = await world.add_scheduler()
    worker = await world.add_worker("a", num_slots=8)
    for number in range(8):
        await world.client.jobs.publish(job(f"r{number}"))
    await world.until(lambda: len(worker.running) == 8)
    await worker.kill()
    second = await world.add_worker("a", num_slots=8)
    await world.until(lambda: len(second.running) == 8, within_s=3.0)
    await world.pass_s(5.0)
    runs = [(d.job.request_id, d.epoch) for d in second.history]
    assert len(runs) == len(set(runs)) == 8
    await second.finish_all()
    await world.until(lambda: world.num_stored == 0)
    assert len(other.state.job_table) == 0


async def test_stop_is_quick(world: World) -> None:
    worker = await world.add_worker()
    worker.mute = True
    await world.client.jobs.publish(job("r1"))
    await world.pass_s(0.1)
    async with asyncio.timeout(2.0):
        await world.stop_scheduler()
