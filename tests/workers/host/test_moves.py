"""KV blocks that move with streams, in a worker's reports."""

from __future__ import annotations

import asyncio

import pytest

from millrace.engine.types import EngineOutput
from millrace.registry.served import ServedModel
from millrace.schemas.control import Cancel, CancelReason, Ended, Prefilled, Pulled, SetRole, Warm
from millrace.schemas.engines import EngineKind, WorkerRole
from millrace.schemas.frames import FinishReason
from millrace.schemas.records import Attempt
from millrace.schemas.transfer import KvSource, TransferEndpoint
from tests.support.waiting import eventually
from tests.workers.scripted import Bench, bench

ENDPOINT = TransferEndpoint(layout="l", token="t", socket="/run/x")
SOURCE = KvSource(worker_id="w-other", endpoint=ENDPOINT, num_tokens=3)


async def _supersede(b: Bench, request_id: str) -> None:
    await b.peer.control.cancel(
        Cancel(request_id=request_id, reason=CancelReason.SUPERSEDED, below_epoch=2)
    )
    await eventually(lambda: not b.worker.requests.holds(request_id))


async def test_the_engine_is_told_of_the_source_and_the_source_when_it_was_used(
    demo: ServedModel,
) -> None:
    async with bench(demo) as b:
        pulled: list[Pulled] = []
        await b.peer.control.subscribe_pulled("w-other", pulled.append)
        assert (await b.dispatch(kv_source=SOURCE)).ok
        assert b.engine.added["r1:1"].kv_source == SOURCE
        b.engine.emit("r1:1")
        b.engine.emit("r1:1", [20])
        b.engine.emit("r1:1", [21], FinishReason.LENGTH)
        await b.ended()
        assert pulled == [Pulled(worker_id="w-other", request_ids=("r1",))]


@pytest.mark.parametrize(("earlier", "cached"), [(0, 1), (2, 2), (9, 3)])
async def test_what_an_earlier_attempt_computed_is_not_charged_as_cached(
    demo: ServedModel, earlier: int, cached: int
) -> None:
    async with bench(demo) as b:
        life = Attempt(epoch=0, worker_id="w-other", cached_tokens=earlier)
        job = b.job(prompt_token_ids=(5, 6, 7, 8))
        assert (await b.dispatch(job, kv_source=SOURCE, attempts=(life,))).ok
        b.engine.step(EngineOutput(request_id="r1:1", num_cached_tokens=3, num_pulled_tokens=2))
        b.engine.emit("r1:1", [20], FinishReason.LENGTH)
        await b.ended()
        (record,) = await b.records()
        assert record.cached_tokens == cached


async def test_its_record_says_what_was_pulled_and_from_whom(demo: ServedModel) -> None:
    earlier = Attempt(epoch=0, worker_id="w-mid", pulled_tokens=16, kv_source="w-first")
    began = EngineOutput(request_id="r1:1", num_cached_tokens=3, num_pulled_tokens=2)
    async with bench(demo) as b:
        job = b.job(prompt_token_ids=(5, 6, 7, 8))
        assert (await b.dispatch(job, kv_source=SOURCE, attempts=(earlier,))).ok
        b.engine.step(began)
        b.engine.emit("r1:1", [20], FinishReason.LENGTH)
        await b.ended()
        (record,) = await b.records()
        assert (record.pulled_tokens, record.kv_source, record.attempts) == (
            18,
            "w-other",
            (earlier,),
        )


async def test_a_source_that_nothing_came_from_is_not_in_the_record(demo: ServedModel) -> None:
    async with bench(demo) as b:
        assert (await b.dispatch(kv_source=SOURCE)).ok
        b.engine.emit("r1:1")
        b.engine.emit("r1:1", [20], FinishReason.LENGTH)
        await b.ended()
        (record,) = await b.records()
        assert (record.pulled_tokens, record.kv_source) == (0, "")


async def test_the_attempt_after_it_hears_what_was_pulled(demo: ServedModel) -> None:
    async with bench(demo) as b:
        ended: list[Ended] = []
        await b.peer.control.subscribe_ended(ended.append)
        assert (await b.dispatch(kv_source=SOURCE)).ok
        b.engine.step(EngineOutput(request_id="r1:1", num_cached_tokens=2, num_pulled_tokens=2))
        b.engine.emit("r1:1", [20])
        await _supersede(b, "r1")
        await eventually(lambda: bool(ended))
        ((served,),) = [one.served for one in ended]
        assert (served.pulled_tokens, served.kv_source) == (2, "w-other")


async def test_what_a_stream_has_is_pulled_before_it_comes(demo: ServedModel) -> None:
    async with bench(demo) as b:
        warm = Warm(job=b.job(prompt_token_ids=(5, 6)), kv_source=SOURCE, token_ids=(7,))
        refused = await b.peer.control.command(b.worker.worker_id, warm, 1.0)
        assert refused is not None
        assert (refused.ok, refused.reason) == (False, "bad_request")
        b.engine.transfer_endpoint = ENDPOINT
        asking = asyncio.create_task(b.peer.control.command(b.worker.worker_id, warm, 5.0))
        await eventually(lambda: "r1/warm" in b.engine.added)
        asked = b.engine.added["r1/warm"]
        assert (asked.prompt_token_ids, asked.kv_source, asked.warms) == ((5, 6, 7), SOURCE, True)
        again = await b.peer.control.command(b.worker.worker_id, warm, 1.0)
        assert again is not None
        assert not again.ok, "that is under way"
        assert not asking.done()
        b.engine.emit("r1/warm", (), FinishReason.STOP)
        reply = await asking
        assert reply is not None
        assert reply.ok
        assert not b.worker.requests.holds("r1")


async def test_an_engine_that_is_lost_has_pulled_nothing_ahead(demo: ServedModel) -> None:
    async with bench(demo) as b:
        b.engine.transfer_endpoint = ENDPOINT
        warm = Warm(job=b.job(prompt_token_ids=(5, 6)), kv_source=SOURCE)
        asking = asyncio.create_task(b.peer.control.command(b.worker.worker_id, warm, 5.0))
        await eventually(lambda: "r1/warm" in b.engine.added)
        b.worker.requests.on_engine_lost()
        reply = await asking
        assert reply is not None
        assert not reply.ok


async def test_a_heartbeat_says_where_blocks_are_pulled_from(demo: ServedModel) -> None:
    async with bench(demo, role=WorkerRole.DECODE) as b:
        b.engine.transfer_endpoint = ENDPOINT
        await b.settle(1.0)
        told = b.statuses[-1]
        assert (told.role, told.transfer) == (WorkerRole.DECODE, ENDPOINT)
        assert told.pull_tokens_per_s == 0
        assert (await b.dispatch(kv_source=SOURCE)).ok
        began = EngineOutput(
            request_id="r1:1", num_cached_tokens=3, num_pulled_tokens=2, queued_s=0.001
        )
        await b.settle(0.5)
        b.engine.step(began)
        await b.settle(1.0)
        assert b.statuses[-1].pull_tokens_per_s > 0


async def test_a_worker_that_ends_waits_for_those_who_pull_what_it_had(demo: ServedModel) -> None:
    async with bench(demo) as b:
        b.engine.transfer_endpoint = ENDPOINT
        await b.dispatch()
        await b.dispatch(b.job("r2"))
        for engine_id in ("r1:1", "r2:1"):
            b.engine.emit(engine_id, [20])
        b.stopping.set()
        await b.settle(0.2)
        for request_id in ("r1", "r2"):
            await _supersede(b, request_id)
        await b.settle(0.5)
        assert b.run is not None
        assert not b.run.done()
        told = Pulled(worker_id=b.worker.worker_id, request_ids=("r1",))
        await b.peer.control.publish_pulled(told)
        await b.settle(0.5)
        assert not b.run.done()
        await b.peer.control.publish_pulled(
            Pulled(worker_id=b.worker.worker_id, request_ids=("r2",))
        )
        await b.settle(0.3)
        await eventually(lambda: b.run is not None and b.run.done())


async def test_ending_worker_does_not_wait_for_pulls_for_ever(demo: ServedModel) -> None:
    async with bench(demo) as b:
        b.engine.transfer_endpoint = ENDPOINT
        await b.dispatch()
        b.engine.emit("r1:1", [20])
        b.stopping.set()
        await b.settle(0.2)
        await _supersede(b, "r1")
        before_s = b.clock.monotonic()
        await b.stop()
        assert 1.5 < b.clock.monotonic() - before_s < 3.0


async def test_what_had_not_begun_or_serves_no_blocks_is_not_waited_for(demo: ServedModel) -> None:
    async with bench(demo) as b:
        await b.dispatch()
        b.engine.emit("r1:1", [20])
        await _supersede(b, "r1")
        assert b.worker.requests.moves.num_kept == 0
        b.engine.transfer_endpoint = ENDPOINT
        await b.dispatch(b.job("r2"))
        await _supersede(b, "r2")
        assert b.worker.requests.moves.num_kept == 0


async def test_a_prefill_worker_tells_once_which_of_its_streams_may_go_on(
    demo: ServedModel,
) -> None:
    async with bench(demo, role=WorkerRole.PREFILL) as b:
        told: list[Prefilled] = []
        await b.peer.control.subscribe_prefilled(told.append)
        await b.dispatch()
        b.engine.emit("r1:1")
        await b.settle()
        assert not told
        b.engine.emit("r1:1", [20])
        b.engine.emit("r1:1", [21])
        await eventually(lambda: bool(told))
        await b.settle(0.5)
        assert told == [Prefilled(worker_id=b.worker.worker_id, request_ids=("r1",))]


async def test_others_tell_nothing_of_the_kind(demo: ServedModel) -> None:
    async with bench(demo) as b:
        told: list[Prefilled] = []
        await b.peer.control.subscribe_prefilled(told.append)
        await b.dispatch()
        b.engine.emit("r1:1", [20])
        await b.settle(0.5)
        assert not told


# --- roles that change ---


async def test_a_worker_that_is_for_prompts_now_says_so_and_lets_its_streams_go_on(
    demo: ServedModel,
) -> None:
    async with bench(demo, role=WorkerRole.DECODE) as b:
        heard: list[Prefilled] = []
        await b.peer.control.subscribe_prefilled(heard.append)
        for request_id in ("r1", "r2", "r3"):
            assert (await b.dispatch(b.job(request_id))).ok
        b.engine.emit("r1:1", [20])
        b.engine.emit("r2:1", [20], FinishReason.LENGTH)
        b.engine.emit("r3:1")
        await b.settle(1.0)
        assert not heard
        assert (await b.command(SetRole(role=WorkerRole.PREFILL))).ok
        assert b.statuses[-1].role is WorkerRole.PREFILL
        await eventually(lambda: bool(heard))
        assert heard == [Prefilled(worker_id=b.worker.worker_id, request_ids=("r1",))]
        assert (await b.command(SetRole(role=WorkerRole.PREFILL))).ok
        b.engine.emit("r3:1", [20])
        await eventually(lambda: len(heard) == 2)
        assert heard[1].request_ids == ("r3",)


async def test_what_a_worker_that_decodes_now_runs_stays(demo: ServedModel) -> None:
    async with bench(demo, role=WorkerRole.PREFILL) as b:
        heard: list[Prefilled] = []
        await b.peer.control.subscribe_prefilled(heard.append)
        assert (await b.dispatch()).ok
        b.engine.emit("r1:1")
        assert (await b.command(SetRole(role=WorkerRole.DECODE))).ok
        b.engine.emit("r1:1", [20])
        b.engine.emit("r1:1", [21], FinishReason.LENGTH)
        await b.ended()
        assert not heard
        await b.settle(2.0)
        assert b.statuses[-1].role is WorkerRole.DECODE


async def test_one_of_two_callers_for_the_same_role_switch_gets_it(demo: ServedModel) -> None:
    async with bench(demo, role=WorkerRole.DECODE) as b:
        asked = SetRole(role=WorkerRole.PREFILL, from_role=WorkerRole.DECODE)
        replies = await asyncio.gather(b.command(asked), b.command(asked))
        assert sorted((reply.ok, reply.reason) for reply in replies) == [
            (False, "stale_role"),
            (True, ""),
        ]


async def test_an_engine_that_takes_no_roles_refuses_them(demo: ServedModel) -> None:
    async with bench(demo, kind=EngineKind.VLLM) as b:
        refused = await b.command(SetRole(role=WorkerRole.PREFILL))
        assert (refused.ok, refused.reason) == (False, "no_roles")
        assert "vllm" in refused.message
        assert b.worker.requests.moves.role is WorkerRole.BOTH
