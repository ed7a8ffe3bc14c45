"""Versions of a model: the choice for each job, and a scheduler's measurements of each version."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from millrace.registry.routing.router import Route, Router
from millrace.scheduler.intake.served_models import ModelCatalogue
from millrace.scheduler.metrics import SchedulerMetrics
from millrace.schemas.config import AutoscaleConfig
from millrace.schemas.control import AnswerTimes
from millrace.schemas.frames import Failed
from millrace.schemas.models.rollouts import Rollout, RolloutState
from millrace.schemas.records import Status
from tests.scheduler.scripted_worker import ScriptedWorker
from tests.scheduler.world import CONFIG, World, job, load_fake
from tests.support.scraped import scrape_of

CANARY = Rollout(
    model="m",
    stable="m",
    candidate="m@v2",
    canary_percent=50.0,
    step_percent=50.0,
    interval_s=5.0,
    min_requests=3,
    abort_if="error_rate>0.1 or ttft_p95>2x",
)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World(msgspec.structs.replace(CONFIG, models=()), models=("m", "m@v2"))
    await made.open()
    yield made
    await made.close()


async def _workers(world: World) -> tuple[ScriptedWorker, ScriptedWorker]:
    old = await world.add_worker(num_slots=64)
    new = await world.add_worker(name="v", model="m@v2", num_slots=64)
    return old, new


async def _start(world: World, rollout: Rollout = CANARY) -> None:
    begun = msgspec.structs.replace(rollout, stepped_ns=world.clock.now_ns())
    await world.rollouts.start(begun)


async def _state(world: World) -> Rollout:
    rollout = await world.rollouts.find("m")
    assert rollout is not None
    return rollout


async def _serve(
    world: World, first: int, count: int, *, reserved: bool = False, **fields: object
) -> None:
    """Publish jobs, as gateways do if ``reserved``, and let each job's worker answer."""
    for number in range(first, first + count):
        await world.client.jobs.publish(job(f"r{number}", **fields), reserved=reserved)
    await world.until(lambda: sum(len(worker.history) for worker in world.workers) >= first + count)
    for worker in world.workers:
        await worker.finish_all()
    await world.until(lambda: world.num_stored == 0)


async def test_jobs_are_shared_out_once_the_new_version_has_a_worker(world: World) -> None:
    old = await world.add_worker(num_slots=64)
    await _start(world)
    await world.pass_s(10.0)
    assert (await _state(world)).state is RolloutState.WAITING
    await _serve(world, 0, 10)
    assert len(old.history) == 10
    new = await world.add_worker(name="v", model="m@v2", num_slots=64)
    await world.pass_s(3.0)
    assert (await _state(world)).percent == 50.0
    await _serve(world, 10, 40)
    assert 8 <= len(new.history) <= 32
    for dispatch in new.history:
        made = dispatch.job
        assert (made.model, made.model_requested, made.route_reason) == ("m@v2", "m", "version")
    assert len(old.history) + len(new.history) == 50
    # The choice holds for the next scheduler that gets the job.
    assert {model for model, _ in world.running_requests.chosen.values()} == {"m", "m@v2"}


async def test_pinned_jobs_stay_where_they_are(world: World) -> None:
    old, new = await _workers(world)
    await _start(world, msgspec.structs.replace(CANARY, canary_percent=99.0))
    await world.pass_s(3.0)
    # A gateway has chosen; so has who names a version.
    await _serve(world, 0, 8, reserved=True)
    assert (len(old.history), len(new.history)) == (8, 0)
    await _serve(world, 8, 8, model="m@v2")
    assert (len(old.history), len(new.history)) == (8, 8)
    await _serve(world, 16, 4, model="m@stable")
    await _serve(world, 20, 4, model="m@initial")
    assert (len(old.history), len(new.history)) == (16, 8)
    await _serve(world, 24, 4, model="m@canary")
    assert (len(old.history), len(new.history)) == (16, 12)
    # Who says what was asked for has not chosen a version.
    await _serve(world, 28, 12, model_requested="m")
    assert len(new.history) >= 20


async def test_a_session_stays_with_its_version(world: World) -> None:
    old, new = await _workers(world)
    await _start(world)
    await world.pass_s(3.0)
    await _serve(world, 0, 12, session_id="s")
    assert sorted((len(old.history), len(new.history))) == [0, 12]


async def test_traffic_moves_on_while_all_is_well_and_the_old_version_keeps_its_streams(
    world: World,
) -> None:
    old, new = await _workers(world)
    for worker in (old, new):
        worker.answer = AnswerTimes(status=Status.DONE, ttft_ms=20.0)
    await world.client.jobs.publish(job("long"))
    await world.until(lambda: "long" in old.running)
    await _start(world)
    await world.pass_s(3.0)
    await _serve_but_long(world, old, 40)
    await world.pass_s(7.0)
    done = await _state(world)
    assert (done.state, done.stable, done.former) == (RolloutState.COMPLETED, "m@v2", "m")
    assert "long" in old.running
    before = len(new.history)
    for number in range(100, 110):
        await world.client.jobs.publish(job(f"r{number}"))
    await world.until(lambda: len(new.history) == before + 10)
    await old.finish("long")
    await new.finish_all()
    await world.until(lambda: world.num_stored == 0)
    scraped = scrape_of(SchedulerMetrics(world.schedulers[0]))
    ended = "millrace_scheduler_rollouts_total"
    assert scraped.value(ended, model="m", result="completed") == 1


async def _serve_but_long(world: World, old: ScriptedWorker, count: int) -> None:
    for number in range(count):
        await world.client.jobs.publish(job(f"r{number}"))
    await world.until(lambda: sum(len(worker.running) for worker in world.workers) == count + 1)
    for worker in world.workers:
        for request_id in list(worker.running):
            if request_id != "long":
                await worker.finish(request_id)
    assert "long" in old.running


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (AnswerTimes(status=Status.FAILED), "error_rate is 100.00%, over 10.00%"),
        (
            AnswerTimes(status=Status.DONE, ttft_ms=50.0),
            "ttft_p95 is 50 ms, over 40 ms, 2 times that of the stable version",
        ),
    ],
)
async def test_a_version_that_does_badly_is_left_at_once(
    world: World, answer: AnswerTimes, reason: str
) -> None:
    old, new = await _workers(world)
    old.answer = AnswerTimes(status=Status.DONE, ttft_ms=20.0)
    new.answer = answer
    await _start(world)
    await world.pass_s(3.0)
    scraped = scrape_of(SchedulerMetrics(world.schedulers[0]))
    assert scraped.value("millrace_scheduler_rollout_percent", model="m") == 50.0
    await _serve(world, 0, 20)
    await world.pass_s(2.0)
    turned = await _state(world)
    assert (turned.state, turned.reason) == (RolloutState.ABORTED, reason)
    before = len(new.history)
    await _serve(world, 20, 20)
    assert len(new.history) == before


async def test_what_was_seen_is_told(world: World) -> None:
    old, new = await _workers(world)
    old.answer = AnswerTimes(status=Status.DONE, ttft_ms=20.0)
    new.answer = AnswerTimes(status=Status.CANCELLED)  # says nothing of a version
    await _start(world, msgspec.structs.replace(CANARY, interval_s=1e3))
    await world.pass_s(3.0)
    await _serve(world, 0, 20)
    await world.pass_s(2.0)
    report = await world.rollouts.report("m")
    assert report is not None
    seen = {one.version: one for one in report.figures}
    assert seen["m"].num_requests == len(old.history)
    assert seen["m"].percentiles_ms["ttft_p95"] == 20.0
    assert seen["m@v2"].num_requests == 0


async def test_a_version_whose_workers_are_gone_is_left_while_others_wait_for_it(
    world: World,
) -> None:
    old, new = await _workers(world)
    await _start(world)
    await world.pass_s(3.0)
    await new.kill()
    for number in range(12):  # under the model's name: some of them wait for the version
        await world.client.jobs.publish(job(f"r{number}"))
    await world.pass_s(25.0)
    turned = await _state(world)
    assert (turned.state, turned.reason) == (RolloutState.ABORTED, "m@v2 has no worker")
    # They wait for their version, which may come back.
    again = await world.add_worker(name="v", model="m@v2", num_slots=12)
    await world.until(lambda: len(again.running) + len(old.running) == 12)
    assert again.running


async def test_of_two_schedulers_each_sees_and_one_decides(world: World) -> None:
    await world.add_scheduler()
    _, new = await _workers(world)
    new.answer = AnswerTimes(status=Status.FAILED)
    await _start(world)
    await world.pass_s(3.0)
    await _serve(world, 0, 30)
    await world.pass_s(3.0)
    assert (await _state(world)).state is RolloutState.ABORTED
    ended = [one.rollouts.num_ended.total() for one in world.schedulers]
    assert sorted(ended) == [0, 1]


async def test_versions_come_and_go_with_the_catalogue(world: World) -> None:
    scheduler = world.schedulers[0]
    old, new = await _workers(world)
    router = Router({"auto": Route(small="small", large="m")})
    await scheduler.follow(ModelCatalogue(("m@v2",), load_fake, None), {"m"})
    labels = {"m@stable", "m@canary", "m@initial"}
    assert set(scheduler.pullers) == {"m", "m@v2", *labels}
    await _serve(world, 0, 4)
    assert (len(old.history), len(new.history)) == (0, 4)
    # A job that a gateway sent to the version that has gone gets another, if it has not run.
    await _serve(world, 4, 2, reserved=True)
    assert len(new.history) == 6
    await world.client.jobs.publish(job("gone", model="m@initial"))
    await world.until(lambda: isinstance(world.terminal("gone"), Failed))
    await scheduler.follow(
        ModelCatalogue(("m", "m@v2", "small"), load_fake, router), {"m", "small"}
    )
    assert set(scheduler.pullers) == {"m", "m@v2", "small", "auto", *labels}
    hard = "Prove that the wheel turns, step by step."
    await world.client.jobs.publish(job("r6", model="auto", prompt=hard, prompt_token_ids=None))
    await world.until(lambda: "r6" in old.running)
    await old.finish("r6")
    await scheduler.follow(ModelCatalogue(("m",), load_fake, None), {"m@v2", "small"})
    assert set(scheduler.pullers) == {"m"}
    await _serve(world, 7, 2)
    assert len(old.history) == 3


async def test_errors_of_callers_do_not_count_against_a_version(world: World) -> None:
    await _workers(world)
    await _start(world, msgspec.structs.replace(CANARY, interval_s=1e3))
    await world.pass_s(3.0)
    for number in range(12):
        await world.client.jobs.publish(job(f"late{number}", model="m@v2", deadline_ns=1))
        await world.client.jobs.publish(job(f"bad{number}", model="m@v2", prompt_token_ids=()))
    await world.until(lambda: world.terminal("late11") is not None)
    await world.until(lambda: world.terminal("bad11") is not None)
    await world.pass_s(3.0)
    assert (await _state(world)).state is RolloutState.RUNNING


async def test_a_scheduler_of_one_version_serves_all_of_its_model() -> None:
    world = World(msgspec.structs.replace(CONFIG, models=("m@v2",)), models=("m", "m@v2", "small"))
    await world.open()
    try:
        assert set(world.schedulers[0].model_queues) == {"m", "m@v2"}
        old, new = await _workers(world)
        await _serve(world, 0, 4)
        assert (len(old.history), len(new.history)) == (4, 0)
    finally:
        await world.close()


async def test_a_version_that_is_to_get_requests_keeps_a_worker() -> None:
    autoscale = AutoscaleConfig(min_workers=0, max_workers=4, idle_s=1.0, scale_down_after_s=1.0)
    config = msgspec.structs.replace(CONFIG, models=(), autoscale=autoscale)
    world = World(config, models=("m", "m@v2"))
    await world.open()
    try:
        await world.pass_s(10.0)
        latest = {status.model: status.desired_workers for status in world.statuses}
        assert latest == {"m": 0, "m@v2": 0}
        await _start(world)
        await world.pass_s(10.0)
        latest = {status.model: status.desired_workers for status in world.statuses}
        assert latest == {"m": 0, "m@v2": 1}
    finally:
        await world.close()


async def test_the_queue_may_be_looked_at_while_versions_come_and_go(world: World) -> None:
    scheduler = world.schedulers[0]
    await _workers(world)
    looking = [asyncio.create_task(scheduler._queue_watch.look()) for _ in range(50)]
    for names in (("m",), ("m", "m@v2"), ("m@v2",), ("m", "m@v2")) * 3:
        await scheduler.follow(ModelCatalogue(names, load_fake, None), {"m", "m@v2"})
    await asyncio.gather(*looking)
    await _serve(world, 0, 4)
