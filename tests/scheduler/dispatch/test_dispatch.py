"""Path of a job from the queue to a worker: late binding, placement, vetoes, refusals."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import msgspec
import pytest

from millrace.registry.catalogue import load_catalogue
from millrace.registry.served import ServedModel
from millrace.scheduler.stages.pull import JobPuller
from millrace.schemas.control import Cancel
from millrace.schemas.frames import Cancelled, Expired, Failed, Queued, Shed
from millrace.schemas.jobs import JobResult, Tier
from millrace.schemas.pooling import Pooling
from millrace.schemas.records import Status
from millrace.schemas.sampling import SamplingParams
from tests.scheduler.world import CONFIG, TENANT_QUEUE, World, job
from tests.support.engine.checkpoints_made import write_catalogue


async def test_a_job_reaches_the_worker_with_its_lease(world: World) -> None:
    worker = await world.add_worker()
    published = await world.client.jobs.publish(job("r1"))
    await world.until(lambda: "r1" in worker.running)
    dispatch = worker.running["r1"]
    assert dispatch.epoch == 1
    assert dispatch.resume_token_ids == ()
    assert dispatch.lease.endswith(f".{published.stream_sequence}")
    await worker.finish("r1")
    await world.until(lambda: world.num_stored == 0)
    await world.until(lambda: len(world.schedulers[0].state.job_table) == 0)
    fleet = world.schedulers[0].state.fleet
    view = fleet.get(worker.worker_id)
    assert view is not None
    assert not view.runs


async def test_pulls_are_bounded_by_room_and_two_jobs_to_choose_from(world: World) -> None:
    worker = await world.add_worker(num_slots=3)
    for number in range(10):
        await world.client.jobs.publish(job(f"r{number}"))
    await world.until(lambda: len(worker.running) == 3)
    await world.pass_s(1.0)
    depth = await world.client.jobs.depth(TENANT_QUEUE)
    assert depth.num_queued == 5
    assert list(worker.running) == ["r0", "r1", "r2"]
    await worker.finish("r1")
    await world.until(lambda: "r3" in worker.running)
    await world.pass_s(1.0)
    assert (await world.client.jobs.depth(TENANT_QUEUE)).num_queued == 4


async def test_with_room_the_next_job_of_a_line_is_waited_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await world.add_worker()
    await world.client.jobs.publish(job("r1"))
    await world.until(lambda: "r1" in worker.running)
    # Neither the news of it nor a count says that there is another one.
    monkeypatch.setattr(JobPuller, "published", lambda _puller, _tenant_queue: None)
    monkeypatch.setattr(JobPuller, "counted", lambda _puller, _totals: None)
    await world.client.jobs.publish(job("r2"))
    await world.until(lambda: "r2" in worker.running, within_s=0.1)


async def test_without_room_no_job_is_waited_for(world: World) -> None:
    worker = await world.add_worker(num_slots=1)
    await world.client.jobs.publish(job("r1"))
    await world.until(lambda: "r1" in worker.running)
    await world.pass_s(5.0)  # what was waited for while there was room
    jobs = [job(f"r{number}") for number in range(2, 9)]
    for one in jobs:
        await world.client.jobs.publish(one)
    await world.pass_s(5.0)
    depth = await world.client.jobs.depth(TENANT_QUEUE)
    assert depth.num_queued == len(jobs) - CONFIG.window_jobs_per_tenant


async def test_without_workers_jobs_stay_in_the_queue(world: World) -> None:
    await world.client.jobs.publish(job("r1"))
    await world.pass_s(3.0)
    assert (await world.client.jobs.depth(TENANT_QUEUE)).num_queued == 1
    assert world.statuses[-1].num_workers == 0
    worker = await world.add_worker()
    await world.until(lambda: "r1" in worker.running)


async def test_the_less_loaded_worker_gets_the_next_job(world: World) -> None:
    busy, idle = await world.add_worker("a"), await world.add_worker("b")
    long = SamplingParams(max_tokens=500, seed=1)
    await world.client.jobs.publish(job("long", sampling=long))
    await world.until(lambda: bool(busy.running or idle.running))
    if idle.running:
        busy, idle = idle, busy
    await world.client.jobs.publish(job("r1"))
    await world.until(lambda: len(busy.running) + len(idle.running) == 2)
    assert list(idle.running) == ["r1"]


async def test_a_veto_sends_the_job_to_another_worker(world: World) -> None:
    first = await world.add_worker("a")
    first.rejection = "full"
    await world.client.jobs.publish(job("r1"))
    await world.pass_s(1.0)
    second = await world.add_worker("b")
    await world.until(lambda: "r1" in second.running)
    assert second.running["r1"].epoch == 1


async def test_a_vetoed_job_waits_for_room_and_is_told_so(world: World) -> None:
    worker = await world.add_worker()
    worker.rejection = "full"
    await world.client.jobs.publish(job("r1"))
    await world.until(lambda: bool(world.frames_of("r1")))
    assert isinstance(world.frames_of("r1")[0], Queued)
    await world.pass_s(20.0)
    assert world.num_stored == 1
    assert world.record("r1") is None
    worker.rejection = ""
    await world.until(lambda: "r1" in worker.running)
    assert worker.running["r1"].epoch == 1
    assert (await world.client.jobs.depth(TENANT_QUEUE)).num_leased == 1


async def test_a_held_job_keeps_its_lease(world: World) -> None:
    worker = await world.add_worker()
    worker.rejection = "full"
    await world.client.jobs.publish(job("r1"))
    await world.pass_s(30.0)
    worker.rejection = ""
    await world.until(lambda: "r1" in worker.running)
    assert worker.running["r1"].lease.split(".")[1] == "1", "it was delivered once"


async def test_blocks_bound_what_a_worker_gets(world: World) -> None:
    worker = await world.add_worker(num_slots=8, num_blocks=20)
    prompt = tuple(range(1, 129))
    for number in range(4):
        await world.client.jobs.publish(job(f"r{number}", prompt_token_ids=prompt))
    await world.until(lambda: len(worker.running) == 2)
    await world.pass_s(2.0)
    assert len(worker.running) == 2
    await worker.finish("r0")
    await world.until(lambda: "r2" in worker.running)


async def test_a_draining_worker_gets_nothing(world: World) -> None:
    worker = await world.add_worker()
    worker.draining = True
    await worker.announce()
    await world.client.jobs.publish(job("r1"))
    await world.pass_s(2.0)
    assert not worker.running
    assert (await world.client.jobs.depth(TENANT_QUEUE)).num_queued == 1


async def test_untokenised_jobs_are_prepared(world: World) -> None:
    worker = await world.add_worker()
    bare = job("r1", prompt_token_ids=None, prompt="hey", sampling=SamplingParams())
    await world.client.jobs.publish(bare)
    await world.until(lambda: "r1" in worker.running)
    prepared = worker.running["r1"].job
    assert prepared.prompt_token_ids == tuple(b"hey")
    assert prepared.prompt is None
    assert prepared.sampling.seed is not None


async def test_a_seed_is_the_same_whoever_draws_it() -> None:
    seeds = []
    for _ in range(2):
        world = World()
        await world.open()
        worker = await world.add_worker()
        await world.client.jobs.publish(job("r1", sampling=SamplingParams(max_tokens=2)))
        await world.until(lambda worker=worker: "r1" in worker.running)  # type: ignore[misc]
        seeds.append(worker.running["r1"].job.sampling.seed)
        await world.close()
    assert seeds[0] == seeds[1]


async def test_a_bad_job_fails_with_frame_record_and_result(world: World) -> None:
    worker = await world.add_worker()
    bad = job("r1", sampling=SamplingParams(max_tokens=5_000, seed=1), store_result=True)
    await world.client.jobs.publish(bad)
    await world.until(lambda: world.num_stored == 0)
    frame = world.terminal("r1")
    assert isinstance(frame, Failed)
    assert (frame.code, frame.retryable) == ("context_length_exceeded", False)
    record = world.record("r1")
    assert record is not None
    assert (record.status, record.error_code) == (Status.FAILED, "context_length_exceeded")
    result = await world.client.results.fetch("local", "r1")
    assert isinstance(result, JobResult)
    assert result.error_code == "context_length_exceeded"
    assert not worker.history


async def test_a_job_that_cannot_be_sent_is_answered_and_holds_no_room(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await world.add_worker(num_slots=1)
    control = world.schedulers[0].state.bus.control
    command = control.command

    async def fail_once(*args: Any) -> Any:
        monkeypatch.setattr(control, "command", command)
        raise OverflowError

    monkeypatch.setattr(control, "command", fail_once)
    await world.client.jobs.publish(job("r1"))
    await world.client.jobs.publish(job("r2"))
    await world.until(lambda: "r2" in worker.running)
    frame = world.terminal("r1")
    assert isinstance(frame, Failed)
    assert (frame.code, frame.retryable) == ("internal_error", False)
    await worker.finish("r2")
    await world.until(lambda: world.num_stored == 0)


async def test_a_scheduler_that_cannot_pull_any_more_ends(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = world.schedulers[0].state.bus.jobs
    monkeypatch.setattr(jobs, "pull", AsyncMock(side_effect=LookupError))
    await world.add_worker()
    await world.client.jobs.publish(job("r1"))
    with pytest.raises(LookupError):
        await world.ended()


async def test_a_job_of_a_tier_that_may_not_use_the_model_fails(tmp_path: Path) -> None:
    catalogue = load_catalogue(str(write_catalogue(tmp_path, "m", "pro")))
    world = World(load=partial(ServedModel.load, catalogue))
    await world.open()
    worker = await world.add_worker()
    await world.client.jobs.publish(job("r1", store_result=True))
    await world.client.jobs.publish(job("r2", tier=Tier.PRO))
    await world.until(lambda: world.terminal("r1") is not None and "r2" in worker.running)
    frame = world.terminal("r1")
    assert isinstance(frame, Failed)
    assert (frame.code, frame.retryable) == ("invalid_parameter", False)
    assert "tiers pro, not for free" in frame.message
    record = world.record("r1")
    assert record is not None
    assert (record.status, record.error_code) == (Status.FAILED, "invalid_parameter")
    assert [dispatch.job.request_id for dispatch in worker.history] == ["r2"]
    await world.close()


async def test_a_job_that_no_worker_could_ever_hold_fails(world: World) -> None:
    await world.add_worker(max_tokens=32)
    await world.client.jobs.publish(job("r1", sampling=SamplingParams(max_tokens=64, seed=1)))
    await world.until(lambda: world.num_stored == 0)
    assert isinstance(world.terminal("r1"), Failed)


async def test_an_embedding_takes_room_for_its_prompt_only(world: World) -> None:
    worker = await world.add_worker(max_tokens=32)
    for request_id, num_tokens in (("fits", 32), ("long", 33)):
        prompt = (5,) * num_tokens
        await world.client.jobs.publish(
            job(request_id, prompt_token_ids=prompt, pooling=Pooling.LAST)
        )
    await world.until(lambda: "fits" in worker.running and world.num_stored == 1)
    failed = world.terminal("long")
    assert isinstance(failed, Failed)
    assert failed.code == "context_length_exceeded"
    assert "completion" not in failed.message


async def test_a_job_of_an_unknown_model_is_answered(world: World) -> None:
    await world.client.jobs.publish(job("r1", model="nobody's"))
    await world.until(lambda: world.num_stored == 0)
    frame = world.terminal("r1")
    assert isinstance(frame, Failed)
    assert frame.code == "model_not_found"
    assert world.record("r1") is not None


async def test_a_cancel_before_the_pull_ends_the_job_untouched(world: World) -> None:
    await world.client.jobs.publish(job("r1"))
    await world.client.control.cancel(Cancel(request_id="r1"))
    await world.pass_s(0.5)
    worker = await world.add_worker()
    await world.until(lambda: world.num_stored == 0)
    assert isinstance(world.terminal("r1"), Cancelled)
    record = world.record("r1")
    assert record is not None
    assert record.status is Status.CANCELLED
    assert not worker.history


async def test_a_cancel_ends_a_held_job_at_once(world: World) -> None:
    worker = await world.add_worker()
    worker.rejection = "full"
    await world.client.jobs.publish(job("r1"))
    await world.until(lambda: bool(world.frames_of("r1")))
    await world.client.control.cancel(Cancel(request_id="r1"))
    await world.until(lambda: world.num_stored == 0, within_s=0.3)
    assert isinstance(world.terminal("r1"), Cancelled)


async def test_a_late_job_expires_at_the_pull_and_while_held(world: World) -> None:
    now_ns = world.clock.now_ns()
    await world.client.jobs.publish(job("late", deadline_ns=now_ns - 1))
    worker = await world.add_worker()
    await world.until(lambda: isinstance(world.terminal("late"), Expired))
    worker.rejection = "full"
    soon_ns = world.clock.now_ns() + 3_000_000_000
    await world.client.jobs.publish(job("soon", deadline_ns=soon_ns))
    await world.pass_s(2.5)
    assert world.terminal("soon") is None
    await world.until(lambda: isinstance(world.terminal("soon"), Expired), within_s=1.0)
    record = world.record("soon")
    assert record is not None
    assert (record.status, record.error_code) == (Status.EXPIRED, "deadline_exceeded")
    assert world.num_stored == 0


async def test_the_newest_are_shed_above_the_bound() -> None:
    world = World(msgspec.structs.replace(CONFIG, max_queued_jobs=5))
    await world.open()
    for number in range(8):
        await world.client.jobs.publish(job(f"r{number}", store_result=True), reserved=True)
    await world.until(lambda: world.num_stored == 5)
    await world.until(lambda: len(world.records()) == 3)
    assert {record.request_id for record in world.records()} == {"r5", "r6", "r7"}
    ends = {(record.status, record.error_code) for record in world.records()}
    frame = world.terminal("r7")
    assert isinstance(frame, Shed)
    assert ends == {(Status.SHED, frame.code)} == {(Status.SHED, "queue_full")}
    assert frame.retry_after_s > 0
    result = await world.client.results.fetch("local", "r6")
    assert result is not None
    assert result.status == "shed"
    await world.until(lambda: world.statuses[-1].num_queued == 5)
    status = world.statuses[-1]
    assert (status.bound, status.num_workers) == (5, 0)
    await world.close()


async def test_queue_status_tells_throughput(world: World) -> None:
    worker = await world.add_worker(num_slots=1)
    for number in range(30):
        await world.client.jobs.publish(job(f"r{number}"))
    for _ in range(10):
        await world.until(lambda: bool(worker.running))
        await world.pass_s(0.5)
        await worker.finish_all()
    await world.pass_s(0.5)
    status = world.statuses[-1]
    assert status.num_workers == 1
    assert status.eta_s is not None
    assert 0 < status.eta_s < 60


@pytest.mark.parametrize("fails", [False, True])
async def test_stopping_or_failing_gives_back_what_waits(
    world: World, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await world.add_worker()
    worker.rejection = "full"
    await world.client.jobs.publish(job("r1"))
    await world.until(lambda: bool(world.frames_of("r1")))
    if fails:
        broken = AsyncMock(side_effect=RuntimeError("unforeseen"))
        monkeypatch.setattr(world.schedulers[0].state.bus.jobs, "pull", broken)
        await world.client.jobs.publish(job("r2"))
        with pytest.raises(RuntimeError):
            await world.ended()
    else:
        await world.stop_scheduler()
    worker.rejection = ""
    await world.add_scheduler()
    await world.until(lambda: "r1" in worker.running, within_s=3.0)
    assert worker.running["r1"].epoch == 65
