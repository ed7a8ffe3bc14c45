"""Usage of each attempt, reported once, and preemption of lower tiers by a new dispatch."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from millrace.engine.types import EngineOutput
from millrace.registry.served import ServedModel
from millrace.schemas.control import Cancel, CancelReason, Drain, Ended, Served
from millrace.schemas.frames import Delta, Done, FinishReason
from millrace.schemas.jobs import Tier
from millrace.schemas.records import Status
from tests.support.manual_clock import ManualClock
from tests.support.waiting import eventually
from tests.workers.scripted import Bench, bench, line_of


@asynccontextmanager
async def _heard(model: ServedModel, **settings: Any) -> AsyncIterator[tuple[Bench, list[Ended]]]:
    ended: list[Ended] = []
    async with bench(model, **settings) as b:
        await b.peer.control.subscribe_ended(ended.append)
        yield b, ended


def _served(ended: list[Ended]) -> list[Served]:
    """Return the notices without the answers' ends, which the tests of rollouts check."""
    every = [served for notice in ended for served in notice.served]
    return [msgspec.structs.replace(served, answer=None) for served in every]


def _ids(ended: list[Ended]) -> list[str]:
    return [request_id for notice in ended for request_id in notice.request_ids]


def _run(request_id: str = "r1", **fields: Any) -> Served:
    fields = {"epoch": 1, "started_ns": ManualClock().now_ns()} | fields
    return Served(request_id=request_id, tenant="local", tier=Tier.FREE, **fields)


async def test_a_resumed_run_is_charged_for_its_own_work(demo: ServedModel) -> None:
    async with _heard(demo) as (b, ended):
        await b.dispatch(epoch=2, resume_token_ids=(20, 21))
        b.engine.step(
            EngineOutput(
                request_id="r1:2",
                token_ids=(22, 23, 24),
                started=True,
                num_cached_tokens=4,
                finish_reason=FinishReason.LENGTH,
            )
        )
        await b.ended()
        await eventually(lambda: bool(ended))
        assert _served(ended) == [
            _run(epoch=2, prompt_tokens=5, cached_tokens=4, completion_tokens=3)
        ]
        (record,) = await b.records()
        assert (record.cached_tokens, record.completion_tokens) == (3, 5)


async def test_cancelled_and_superseded_runs_are_charged_too(demo: ServedModel) -> None:
    async with _heard(demo) as (b, ended):
        for name in ("r1", "r2", "r3"):
            await b.dispatch(b.job(name))
        b.engine.emit("r1:1", [20, 21])
        b.engine.emit("r2:1", [20])
        await b.peer.control.cancel(Cancel(request_id="r1"))
        for name in ("r2", "r3"):
            await b.command(Cancel(request_id=name, reason=CancelReason.SUPERSEDED, below_epoch=2))
        await b.settle(1.0)
        # The third had not begun.
        assert sorted(_served(ended), key=lambda s: s.request_id) == [
            _run("r1", prompt_tokens=3, completion_tokens=2),
            _run("r2", prompt_tokens=3, completion_tokens=1),
        ]
        assert sorted(_ids(ended)) == ["r1", "r2", "r3"]
        assert not any(notice.released for notice in ended)


async def test_a_run_is_charged_once_though_its_end_is_told_again(demo: ServedModel) -> None:
    async with _heard(demo) as (b, ended):
        await b.dispatch()
        b.engine.emit("r1:1", [20], FinishReason.LENGTH)
        await b.ended()
        await b.dispatch(lease="$ACK.demo.2.1", epoch=65)
        await eventually(lambda: len(_ids(ended)) == 2)
        assert _served(ended) == [_run(prompt_tokens=3, completion_tokens=1)]


async def test_a_run_that_another_replaces_here_is_charged_but_not_ended(
    demo: ServedModel,
) -> None:
    async with _heard(demo) as (b, ended):
        await b.dispatch()
        b.engine.emit("r1:1", [20, 21])
        await b.dispatch(lease="$ACK.demo.2.1", epoch=65, resume_token_ids=(30,))
        await eventually(lambda: bool(ended))
        assert ended == [
            Ended(
                worker_id=b.worker.worker_id,
                request_ids=(),
                served=(_run(prompt_tokens=3, completion_tokens=2),),
            )
        ]


async def test_what_is_given_back_is_told_after_its_lease_went(
    demo: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(demo, drain_timeout_s=2.0) as b:
        job = b.job()
        ended: list[Ended] = []
        release = b.bus.jobs.release

        async def not_told_before(lease: str, delay_s: float = 0.0) -> None:
            assert not ended
            await release(lease, delay_s)

        monkeypatch.setattr(b.bus.jobs, "release", not_told_before)
        await b.peer.control.subscribe_ended(ended.append)
        await b.dispatch(job)
        b.engine.emit("r1:1", [20])
        await b.stop()
        assert ended == [
            Ended(
                worker_id=b.worker.worker_id,
                request_ids=("r1",),
                served=(_run(prompt_tokens=3, completion_tokens=1),),
                released=("r1",),
            )
        ]
        (leased,) = await b.peer.jobs.pull(line_of(job), 1, 0.0)
        assert leased.num_deliveries == 2


# --- drain ------------------------------------------------------------------------------------


async def test_draining_worker_gives_back_in_time_requests_that_were_not_moved(
    demo: ServedModel,
) -> None:
    async with _heard(demo, drain_timeout_s=3.0) as (b, ended):
        for name in ("moved", "done", "left"):
            await b.dispatch(b.job(name))
            b.engine.emit(f"{name}:1", [20])
        await b.settle(0.1)
        await b.command(Drain(reason="scale down"))
        await b.settle()
        assert b.statuses[-1].draining
        b.engine.emit("moved:1", [21])
        await b.command(Cancel(request_id="moved", reason=CancelReason.SUPERSEDED, below_epoch=2))
        b.engine.emit("moved:1", [22])
        b.engine.emit("done:1", [21], FinishReason.LENGTH)
        await b.settle(1.0)
        assert isinstance(b.of("done")[-1], Done)
        b.engine.emit("left:1", [21])
        await b.settle(3.0)
        assert b.worker.requests.num_running == 0
        assert [notice.released for notice in ended if notice.released] == [("left",)]
        assert _tokens(b, "left") == [20, 21]
        assert _tokens(b, "moved") == [20, 21]
        assert b.run is not None
        assert not b.run.done(), "it is the operator who ends the process"


async def test_a_drained_worker_ends_at_once_when_all_was_moved(demo: ServedModel) -> None:
    async with _heard(demo, drain_timeout_s=60.0) as (b, ended):
        await b.dispatch()
        b.engine.emit("r1:1", [20])
        b.stopping.set()
        await b.settle(0.1)
        assert b.statuses[-1].draining
        await b.peer.control.cancel(
            Cancel(request_id="r1", reason=CancelReason.SUPERSEDED, below_epoch=2)
        )
        await b.settle(0.3)
        assert b.run is not None
        assert b.run.done()
        assert _ids(ended) == ["r1"]
        assert not await b.records()


async def test_worker_told_twice_to_drain_gives_back_at_once(demo: ServedModel) -> None:
    async with _heard(demo, drain_timeout_s=60.0) as (b, ended):
        await b.dispatch()
        b.engine.emit("r1:1", [20])
        b.stopping.set()
        await b.settle(0.5)
        assert b.run is not None
        assert not b.run.done()
        b.worker.force_shutdown()
        await b.settle(0.5)
        assert b.run.done()
        assert [notice.released for notice in ended if notice.released] == [("r1",)]


def _tokens(b: Bench, request_id: str) -> list[int]:
    return [t for f in b.of(request_id) if isinstance(f, Delta) for t in f.token_ids]


# --- at the door ------------------------------------------------------------------------------


async def test_lower_tiers_make_way_for_a_dispatch_to_a_full_worker(demo: ServedModel) -> None:
    async with bench(demo, max_num_sequences=2, max_num_waiting=1) as b:
        names = iter(range(100))

        async def takes(tier: Tier) -> bool:
            return (await b.dispatch(b.job(f"r{next(names)}", tier=tier))).ok

        assert [await takes(Tier.BATCH) for _ in range(4)] == [True, True, True, False]
        assert [await takes(Tier.PRO) for _ in range(2)] == [True, True]
        # Of the free tier there is room for one: the batch jobs make way, the others do not.
        assert [await takes(Tier.FREE) for _ in range(2)] == [True, False]
        # No more than twice the capacity in all.
        assert b.worker.requests.num_running == 6
        assert not await takes(Tier.ENTERPRISE)
        assert b.worker.requests.num_held_by_tier() == {
            Tier.BATCH: 3,
            Tier.PRO: 2,
            Tier.FREE: 1,
        }
        by_tier = {request.priority for request in b.engine.added.values()}
        assert by_tier == {-1, 0, 1}


async def test_proposed_tokens_are_added_up(demo: ServedModel) -> None:
    async with _heard(demo) as (b, _):
        await b.dispatch()
        for proposed, accepted, ends in ((4, 2, None), (0, 0, None), (3, 3, FinishReason.LENGTH)):
            b.engine.step(
                EngineOutput(
                    request_id="r1:1",
                    token_ids=(22,),
                    started=True,
                    num_proposed_tokens=proposed,
                    num_accepted_tokens=accepted,
                    finish_reason=ends,
                )
            )
        await b.ended()
        (record,) = await b.records()
        assert (record.proposed_tokens, record.accepted_tokens) == (7, 5)


async def test_schedulers_hear_how_a_request_ended(demo: ServedModel) -> None:
    async with _heard(demo) as (b, ended):
        await b.dispatch(b.job("r1"))
        b.engine.emit("r1:1", [20, 21])
        b.engine.step(EngineOutput(request_id="r1:1", error=("engine_failed", "It broke.")))
        await b.ended()
        await eventually(lambda: bool(ended))
        ((served,),) = [notice.served for notice in ended]
        assert served.answer is not None
        (record,) = await b.records()
        assert served.answer.status == record.status == Status.FAILED
        assert (served.answer.ttft_ms, served.answer.total_ms) == (record.ttft_ms, record.total_ms)


async def test_a_request_that_expired_before_it_began_is_told_of(demo: ServedModel) -> None:
    async with _heard(demo) as (b, ended):
        await b.dispatch(b.job("r1", deadline_ns=b.clock.now_ns() + 10**9))
        await b.settle(5.0)
        await eventually(lambda: bool(ended))
        ((served,),) = [notice.served for notice in ended]
        assert served.answer is not None
        assert served.answer.status == Status.EXPIRED
        assert (served.started_ns, served.device_us, served.completion_tokens) == (0, 0, 0)
