"""KV sources of moved streams: dispatches name a worker that has the stream's blocks."""

from __future__ import annotations

import asyncio

import pytest

from millrace.schemas.control import MoveStreams, ResumePoint
from millrace.schemas.sampling import SamplingParams
from tests.scheduler.lending import LONG, serving, tell_cached
from tests.scheduler.scripted_worker import ScriptedWorker
from tests.scheduler.world import World, job

PROMPT = tuple(range(1, 65))


async def _run(world: World, worker: ScriptedWorker, *request_ids: str) -> None:
    for request_id in request_ids:
        await world.client.jobs.publish(job(request_id, prompt_token_ids=PROMPT))
    await world.until(lambda: set(worker.running) >= set(request_ids))


async def _move(world: World, worker: ScriptedWorker, to: ScriptedWorker | None = None) -> None:
    to_worker_id = "" if to is None else to.worker_id
    move = MoveStreams(worker_id=worker.worker_id, to_worker_id=to_worker_id)
    await world.client.control.move_streams(move)


async def _drain(worker: ScriptedWorker) -> None:
    worker.draining = True
    await worker.announce()


async def test_a_drained_worker_is_the_source_of_all_that_its_streams_have(world: World) -> None:
    point = ResumePoint(token_ids=(9, 8, 7))
    await world.client.control.serve_resume_points("client", lambda _: point)
    first = await serving(world, "a")
    await _run(world, first, "r1", "r2")
    second = await serving(world, "b")
    await _drain(first)
    await world.until(lambda: len(second.running) == 2)
    for moved in second.running.values():
        source = moved.kv_source
        assert source is not None
        assert (source.worker_id, source.endpoint) == (first.worker_id, first.transfer)
        assert source.num_tokens == len(PROMPT) + 3
    assert world.schedulers[0].model_queues["m"].counts.moves == {"pulled": 2}


async def test_nothing_is_pulled_between_other_weights_layouts_or_by_who_cannot(
    world: World,
) -> None:
    first = await serving(world, "a")
    await _run(world, first, "r1")
    second = await world.add_worker("b")
    await _drain(first)
    await world.until(lambda: "r1" in second.running)
    assert second.running["r1"].kv_source is None
    assert world.schedulers[0].model_queues["m"].counts.moves == {"computed": 1}
    second.hand_over_blocks()
    await second.announce()
    third = await serving(world, "c")
    third.weights = "others"
    await third.announce()
    await _drain(second)
    await world.until(lambda: "r1" in third.running)
    assert third.running["r1"].kv_source is None


async def test_an_engine_that_is_down_serves_nothing(world: World) -> None:
    first = await serving(world, "a")
    await _run(world, first, "r1")
    second = await serving(world, "b")
    first.engine_down = True
    await first.announce()
    await world.until(lambda: "r1" in second.running)
    assert second.running["r1"].kv_source is None


async def test_a_dead_worker_is_no_source(world: World) -> None:
    first = await serving(world, "a")
    await _run(world, first, "r1")
    second = await serving(world, "b")
    await first.kill()
    await world.until(lambda: "r1" in second.running)
    assert second.running["r1"].kv_source is None


async def test_a_refused_move_is_sent_again_with_its_source(world: World) -> None:
    first = await serving(world, "a")
    await _run(world, first, "r1")
    second = await serving(world, "b")
    second.rejection = "full"
    await _drain(first)
    await world.until(lambda: not first.running)
    second.rejection = ""
    await second.announce()
    await world.until(lambda: "r1" in second.running)
    source = second.running["r1"].kv_source
    assert source is not None
    assert source.worker_id == first.worker_id


async def _run_long(world: World, worker: ScriptedWorker, number: int) -> None:
    for index in range(number):
        await world.client.jobs.publish(job(f"r{index}", prompt_token_ids=LONG))
    await world.until(lambda: len(worker.running) == number)


async def _until_warmed(
    world: World, first: ScriptedWorker, num_streams: int = 1
) -> ScriptedWorker:
    """A worker that pulls for a stream of another, which drains, until ``warms_when``."""
    await _run_long(world, first, num_streams)
    second = await serving(world, "b")
    second.warms_when = asyncio.Event()
    await _drain(first)
    await world.until(lambda: bool(second.warmed))
    return second


async def test_what_a_stream_has_is_pulled_before_it_leaves(world: World) -> None:
    point = ResumePoint(token_ids=(9, 8, 7))
    await world.client.control.serve_resume_points("client", lambda _: point)
    first = await serving(world, "a")
    second = await _until_warmed(world, first)
    (warm,) = second.warmed
    assert (warm.job.request_id, warm.token_ids) == ("r0", (9, 8, 7))
    assert warm.kv_source.worker_id == first.worker_id
    await world.pass_s(1.0)
    assert set(first.running) == {"r0"}, "it goes on there meanwhile"
    assert second.warms_when is not None
    second.warms_when.set()
    await world.until(lambda: "r0" in second.running)
    assert second.running["r0"].kv_source is not None, "for what it has made since"
    assert len(second.warmed) == 1


async def test_streams_are_pulled_one_after_the_other(world: World) -> None:
    """A pull takes a fifth of a second at the worker's reported speed."""
    first = await serving(world, "a", num_slots=16)
    await _run_long(world, first, 4)
    second = await serving(world, "b", num_slots=16)
    second.prefill_tokens_per_s, second.pull_tokens_per_s = 400.0, 2_000.0
    second.warms_when = asyncio.Event()
    await second.announce()
    await _drain(first)
    await world.until(lambda: len(second.warmed) == 1)
    second.outstanding_pull_tokens = 400
    await second.announce()
    await world.pass_s(1.0)
    assert len(second.warmed) == 1
    second.outstanding_pull_tokens = 0
    second.warms_when.set()
    await second.announce()
    await world.until(lambda: len(second.running) == 4)


async def test_short_ones_leave_at_once(world: World) -> None:
    first = await serving(world, "a")
    await world.client.jobs.publish(job("r0", prompt_token_ids=PROMPT[:32]))
    await world.until(lambda: "r0" in first.running)
    second = await serving(world, "b")
    await _drain(first)
    await world.until(lambda: "r0" in second.running)
    assert not second.warmed


async def test_the_prompt_of_a_job_without_a_listener_is_pulled(world: World) -> None:
    first = await serving(world, "a")
    await world.client.jobs.publish(job("r0", prompt_token_ids=LONG, reply=""))
    await world.until(lambda: "r0" in first.running)
    second = await serving(world, "b")
    await _drain(first)
    await world.until(lambda: "r0" in second.running)
    assert [warm.token_ids for warm in second.warmed] == [()]


async def test_a_stream_leaves_also_where_nothing_could_be_pulled_ahead(world: World) -> None:
    first = await serving(world, "a")
    await _run_long(world, first, 1)
    second = await serving(world, "b")
    second.refuses_to_warm = True
    await _drain(first)
    await world.until(lambda: "r0" in second.running)
    assert second.running["r0"].kv_source is not None


async def test_a_stream_goes_elsewhere_when_the_worker_that_pulls_for_it_is_gone(
    world: World,
) -> None:
    first = await serving(world, "a")
    second = await _until_warmed(world, first)
    third = await serving(world, "c")
    await second.kill()
    await world.until(lambda: "r0" in third.running)
    assert [one.job.request_id for one in third.warmed] == ["r0"]


async def test_a_stream_that_ends_while_it_is_pulled_leaves_nothing_behind(world: World) -> None:
    first = await serving(world, "a")
    second = await _until_warmed(world, first, 2)
    assert second.warms_when is not None
    ended = second.warmed[0].job.request_id
    await first.finish(ended)
    second.warms_when.set()
    await second.announce()
    await world.until(lambda: len(second.running) == 1)
    await world.pass_s(1.0)
    assert ended not in second.running
    warming = world.schedulers[0].migration._warming
    assert not warming._pulls


async def test_a_stream_leaves_also_if_nobody_says_that_it_was_pulled(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.scheduler.dispatch.migration._TIMEOUT_S", 0.1)
    first = await serving(world, "a")
    second = await _until_warmed(world, first)
    await world.until(lambda: "r0" in second.running)
    assert second.running["r0"].kv_source is not None


async def test_an_operator_moves_what_runs_now_and_the_worker_goes_on(world: World) -> None:
    first = await serving(world, "a")
    await _run(world, first, "r1", "r2")
    await serving(world, "b")
    third = await serving(world, "c")
    await _move(world, first, third)
    await world.until(lambda: len(third.running) == 2)
    assert not first.running
    fillers = [f"f{number}" for number in range(6)]
    for name in fillers:
        await world.client.jobs.publish(job(name))
    await world.until(lambda: bool(first.running))


async def test_a_move_goes_nowhere_without_room(world: World) -> None:
    first = await serving(world, "a")
    await _run(world, first, "r1", "r2")
    second = await serving(world, "b", num_slots=1)
    await _move(world, first)
    await world.until(lambda: len(second.running) == 1)
    await world.pass_s(1.0)
    assert len(first.running) == 1
    await second.finish_all()
    await world.pass_s(2.0)
    assert len(first.running) == 1, "it was asked for once"


async def test_a_cached_prefix_is_pulled_where_its_holder_is_full(world: World) -> None:
    first = await serving(world, "a", num_slots=1)
    await _run(world, first, "r1")
    await tell_cached(world, first, PROMPT, num_blocks=3)
    second = await serving(world, "b")
    second.prefill_tokens_per_s, second.pull_tokens_per_s = 1_000.0, 100_000.0
    await second.announce()
    await _run(world, second, "r2")
    source = second.running["r2"].kv_source
    assert source is not None
    assert (source.worker_id, source.num_tokens) == (first.worker_id, 48)
    scored = SamplingParams(max_tokens=4, seed=1, prompt_logprobs=1)
    await world.client.jobs.publish(job("r3", prompt_token_ids=PROMPT, sampling=scored))
    await world.until(lambda: "r3" in second.running)
    assert second.running["r3"].kv_source is None, "all of it is asked for"
