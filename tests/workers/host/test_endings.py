"""Ends of a request: its frames, its record, its result, its lease."""

from __future__ import annotations

from decimal import Decimal
from itertools import pairwise

import pytest

from millrace.bus import subjects
from millrace.engine.types import EngineOutput
from millrace.registry.served import ServedModel
from millrace.schemas.chat.asked import Api
from millrace.schemas.control import Cancel, CancelReason
from millrace.schemas.errors import BusUnavailableError
from millrace.schemas.frames import (
    Cancelled,
    Done,
    Expired,
    Failed,
    FinishReason,
    TokenLogprob,
    Usage,
)
from millrace.schemas.records import Record, RequestRecord, Status
from tests.support.waiting import eventually
from tests.workers.scripted import EOS, bench

_S = 1_000_000_000


async def test_done_leaves_frames_a_record_and_no_job(demo: ServedModel) -> None:
    hello, world = demo.tokenizer.encode("hello", False), demo.tokenizer.encode(" world", False)
    async with bench(demo) as b:
        job = b.job(tenant="t", user="u", session_id="s", model_requested="auto")
        assert (await b.dispatch(job)).ok
        added = b.engine.added["r1:1"]
        assert (added.prompt_token_ids, added.tenant) == ((10, 11, 12), "t")
        await b.settle(1.0)
        b.engine.step(
            EngineOutput(
                request_id="r1:1",
                token_ids=tuple(hello),
                started=True,
                queued_s=0.25,
                num_cached_tokens=2,
            )
        )
        await b.settle(0.5)
        b.engine.step(
            EngineOutput(
                request_id="r1:1",
                token_ids=(*world, EOS),
                finish_reason=FinishReason.STOP,
                num_preemptions=3,
            )
        )
        num_tokens = len(hello) + len(world) + 1
        assert await b.ended() == Done(
            epoch=1, finish_reason=FinishReason.STOP, num_tokens=num_tokens
        )
        assert b.kinds() == ["Started", "Delta", "Delta", "Usage", "Done"]
        assert b.text() == "hello world"
        assert b.of()[3] == Usage(
            epoch=1, prompt_tokens=3, cached_tokens=2, completion_tokens=num_tokens
        )
        assert await b.num_queued() == 0
        (record,) = await b.records()
        assert record == RequestRecord(
            request_id="r1",
            tenant="t",
            user="u",
            session_id="s",
            model_requested="auto",
            model_served="demo",
            worker_id=b.worker.worker_id,
            prompt_tokens=3,
            cached_tokens=2,
            completion_tokens=num_tokens,
            queue_ms=250.0,
            ttft_ms=1000.0,
            tpot_us=500_000.0 / (num_tokens - 1),
            total_ms=1500.0,
            finish_reason="stop",
            cost=Decimal(2 + 2 * num_tokens) / 1_000_000,
            price_version="v1",
            received_ns=job.received_ns,
            started_ns=job.received_ns + _S // 4,
            first_token_ns=job.received_ns + _S,
            done_ns=job.received_ns + _S * 3 // 2,
            epoch=1,
            num_preemptions=3,
            api=Api.JOB,
            stream=True,
            max_tokens=job.sampling.max_tokens,
        )
        await eventually(
            lambda: b.index.calls == [("start", "r1", 1), ("finish", "r1", 1)], what="the index"
        )


async def test_a_stop_string_ends_the_sequence_and_cuts_the_text(demo: ServedModel) -> None:
    tokens = demo.tokenizer.encode("one two END three", False)
    async with bench(demo) as b:
        await b.dispatch(b.job(sampling={"stop": ("END",)}))
        for token in tokens:
            b.engine.emit("r1:1", [token])
        done = await b.ended()
        assert b.engine.cancelled == ["r1:1"]
        assert b.text() == "one two "
        assert isinstance(done, Done)
        assert done.finish_reason is FinishReason.STOP
        sent = [token for delta in b.deltas() for token in delta.token_ids]
        assert sent == tokens[: len(sent)]
        assert "END" in demo.tokenizer.decode(sent)
        (record,) = await b.records()
        assert record.completion_tokens == done.num_tokens == len(sent)


async def test_length_flushes_what_was_held_back(demo: ServedModel) -> None:
    tokens = demo.tokenizer.encode("see EN", False)
    async with bench(demo) as b:
        await b.dispatch(b.job(sampling={"stop": ("END",)}))
        b.engine.emit("r1:1", tokens[:-1])
        await b.settle(1.0)
        b.engine.emit("r1:1", tokens[-1:], FinishReason.LENGTH)
        await b.ended()
        assert b.text() == "see EN"


@pytest.mark.parametrize(
    ("reason", "frame", "status", "code"),
    [
        (CancelReason.CLIENT, Cancelled(epoch=1, num_tokens=2), Status.CANCELLED, "cancelled"),
        (CancelReason.DISCONNECT, Cancelled(epoch=1, num_tokens=2), Status.CANCELLED, "cancelled"),
        (
            CancelReason.DEADLINE,
            Expired(epoch=1, num_tokens=2),
            Status.EXPIRED,
            "deadline_exceeded",
        ),
    ],
)
async def test_cancelled(
    demo: ServedModel, reason: CancelReason, frame: Cancelled | Expired, status: Status, code: str
) -> None:
    async with bench(demo) as b:
        await b.dispatch()
        b.engine.emit("r1:1", [20, 21])
        await b.peer.control.cancel(Cancel(request_id="r1", reason=reason))
        assert await b.ended() == frame
        assert b.engine.cancelled == ["r1:1"]
        (record,) = await b.records()
        ended = (record.status, record.error_code, record.completion_tokens)
        assert ended == (status, code, 2)
        assert await b.num_queued() == 0
        # What the step that was under way still made is of no use to anybody.
        b.engine.emit("r1:1", [22])
        await b.settle(1.0)
        assert b.of()[-1] == frame


async def test_cancelled_by_the_service_of_its_tenant_alone(demo: ServedModel) -> None:
    async with bench(demo) as b:
        await b.dispatch(b.job(tenant="acme"))
        b.engine.emit("r1:1", [20, 21])
        await b.settle(1.0)
        for tenant in ("shop", "acme"):
            assert not b.engine.cancelled
            b.broker.publish(subjects.owner_cancel(tenant, "r1"), b"")
            await b.settle(1.0)
        assert await b.ended() == Cancelled(epoch=1, num_tokens=2)
        # A cancel of a request that has ended changes nothing.
        b.broker.publish(subjects.owner_cancel("acme", "r1"), b"")
        await b.settle(1.0)
        assert b.kinds().count("Cancelled") == 1


async def test_cancelled_before_it_started(demo: ServedModel) -> None:
    async with bench(demo) as b:
        await b.dispatch()
        assert (await b.command(Cancel(request_id="r1"))).ok
        assert await b.ended() == Cancelled(epoch=1)
        (record,) = await b.records()
        assert (record.started_ns, record.ttft_ms, record.queue_ms) == (0, 0.0, 0.0)
        assert (record.cost, record.price_version) == (Decimal(0), "")
        assert b.kinds() == ["Cancelled"]


async def test_a_request_that_the_engine_refuses_costs_nothing(demo: ServedModel) -> None:
    """The record counts one request without tokens."""
    async with bench(demo) as b:
        await b.dispatch(b.job(store_result=True, tenant="t"))
        b.engine.step(EngineOutput(request_id="r1:1", error=("grammar_invalid", "no")))
        assert await b.ended() == Failed(epoch=1, code="grammar_invalid", message="no")
        assert b.of()[:-1] == [Usage(epoch=1)]
        (record,) = await b.records()
        assert (record.cost, record.price_version, record.started_ns) == (Decimal(0), "", 0)
        assert (record.status, record.prompt_tokens) == (Status.FAILED, 3)
        result = await b.peer.results.fetch("t", "r1")
        assert result is not None
        assert result.usage == Usage()


async def test_a_request_that_fails_after_its_prompt_was_computed_is_paid(
    demo: ServedModel,
) -> None:
    async with bench(demo) as b:
        await b.dispatch()
        error = ("grammar_invalid", "It cannot be followed any further.")
        b.engine.step(EngineOutput(request_id="r1:1", error=error, started=True))
        await b.ended()
        (record,) = await b.records()
        assert (record.cost, record.price_version) == (Decimal(3) / 1_000_000, "v1")


async def test_the_deadline_passes(demo: ServedModel) -> None:
    async with bench(demo) as b:
        await b.dispatch(b.job(deadline_ns=b.clock.now_ns() + _S))
        b.engine.emit("r1:1", [20])
        await b.settle(0.8)
        assert b.kinds() == ["Started", "Delta"]
        await b.settle(0.4)
        assert await b.ended() == Expired(epoch=1, num_tokens=1)
        assert b.engine.cancelled == ["r1:1"]
        (record,) = await b.records()
        assert (record.status, record.error_code) == (Status.EXPIRED, "deadline_exceeded")


async def test_a_deadline_that_has_passed_never_reaches_the_engine(demo: ServedModel) -> None:
    async with bench(demo) as b:
        await b.dispatch(b.job(deadline_ns=b.clock.now_ns()))
        assert await b.ended() == Expired(epoch=1)
        assert not b.engine.added
        (record,) = await b.records()
        assert (record.cost, record.price_version) == (Decimal(0), "")


async def test_an_engine_error_fails_the_request_only(demo: ServedModel) -> None:
    async with bench(demo) as b:
        await b.dispatch()
        await b.dispatch(b.job("r2"))
        b.engine.step(
            EngineOutput(request_id="r1:1", error=("kv_capacity_exceeded", "too long")),
            EngineOutput(request_id="r2:1", token_ids=(20,), started=True),
        )
        assert await b.ended() == Failed(epoch=1, code="kv_capacity_exceeded", message="too long")
        (record,) = await b.records()
        assert (record.status, record.error_code) == (Status.FAILED, "kv_capacity_exceeded")
        assert b.kinds("r2") == ["Started", "Delta"]


async def test_a_result_is_stored_before_the_ack(demo: ServedModel) -> None:
    tokens = demo.tokenizer.encode("an answer", False)
    async with bench(demo) as b:
        await b.dispatch(b.job(store_result=True, reply="", tenant="t"))
        b.engine.emit("r1:1", tokens, FinishReason.LENGTH)
        await eventually(lambda: b.worker.requests.num_running == b.worker.requests.num_ending == 0)
        result = await b.peer.results.fetch("t", "r1")
        assert result is not None
        assert (result.text, result.status) == ("an answer", "done")
        assert result.usage == Usage(prompt_tokens=3, completion_tokens=len(tokens))
        assert result.token_ids == tuple(tokens)
        cuts = (0, *result.text_ends)
        pieces = [result.text[start:end] for start, end in pairwise(cuts)]
        assert pieces == [demo.tokenizer.decode([token]) for token in tokens]
        assert not b.envelopes


async def test_a_result_too_large_for_the_bus_says_so(demo: ServedModel) -> None:
    token = demo.tokenizer.encode("A millrace", False)[0]
    async with bench(demo) as b:
        b.broker.max_payload_bytes = 2000
        await b.dispatch(b.job(store_result=True, reply="", sampling={"max_tokens": 4000}))
        b.engine.emit("r1:1", [token] * 3000, FinishReason.LENGTH)
        await eventually(lambda: b.worker.requests.num_running == b.worker.requests.num_ending == 0)
        result = await b.peer.results.fetch("local", "r1")
        assert result is not None
        assert (result.text, result.error_code) == ("", "payload_too_large")


@pytest.mark.parametrize(
    ("limit_bytes", "has_logprobs", "has_tokens"),
    [(20_000, True, True), (3_000, False, True), (1_000, False, False)],
)
async def test_a_result_sheds_what_the_bus_does_not_take(
    demo: ServedModel, limit_bytes: int, has_logprobs: bool, has_tokens: bool
) -> None:
    tokens = demo.tokenizer.encode("some words of an answer", False)[:4] * 30
    async with bench(demo) as b:
        b.broker.max_payload_bytes = limit_bytes
        sampling = {"max_tokens": 500, "logprobs": 2, "prompt_logprobs": 0}
        await b.dispatch(b.job(store_result=True, reply="", sampling=sampling))
        scores = tuple(TokenLogprob(token, -0.5, ((token, -0.5), (7, -1.5))) for token in tokens)
        b.engine.step(
            EngineOutput(
                request_id="r1:1",
                started=True,
                token_ids=tuple(tokens),
                logprobs=scores,
                prompt_logprobs=(None, scores[0], scores[1]),
                finish_reason=FinishReason.LENGTH,
            )
        )
        await eventually(lambda: b.worker.requests.num_running == b.worker.requests.num_ending == 0)
        result = await b.peer.results.fetch("local", "r1")
        assert result is not None
        assert (result.status, result.text) == ("done", demo.tokenizer.decode(tokens))
        assert result.logprobs == (scores if has_logprobs else ())
        assert len(result.prompt_logprobs) == (3 if has_logprobs else 0)
        assert result.token_ids == (tuple(tokens) if has_tokens else ())
        assert len(result.text_ends) == len(result.token_ids)


async def test_the_order_is_record_then_ack_and_an_outage_delays_nobody_else(
    demo: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(demo) as b:
        stored: list[str] = []
        refused = {"r1": 3}
        publish = b.bus.outbox.publish

        async def flaky(record: Record, linger_s: float = 0.0) -> None:
            if not isinstance(record, RequestRecord):
                await publish(record, linger_s)  # the last sample
                return
            assert await b.num_queued() > 0
            if refused.get(record.request_id, 0):
                refused[record.request_id] -= 1
                raise BusUnavailableError("away")
            stored.append(record.request_id)
            await publish(record, linger_s)

        monkeypatch.setattr(b.bus.outbox, "publish", flaky)
        await b.dispatch()
        await b.dispatch(b.job("r2"))
        b.engine.emit("r1:1", [20], FinishReason.LENGTH)
        b.engine.emit("r2:1", [20], FinishReason.LENGTH)
        await b.settle()
        assert stored == ["r2"]
        assert (b.worker.requests.num_ending, await b.num_queued()) == (1, 1)
        # The lease is kept while the record waits.
        await b.settle(0.3)
        await b.settle(0.3)
        assert stored == ["r2", "r1"]
        assert (b.worker.requests.num_ending, await b.num_queued()) == (0, 0)


async def test_an_ending_holds_its_lease_while_the_bus_is_away(demo: ServedModel) -> None:
    async with bench(demo) as b:
        await b.dispatch()
        b.broker.stop()
        b.engine.emit("r1:1", [20], FinishReason.LENGTH)
        await b.settle(3.0)
        b.broker.start()
        await b.settle(2.5)
        assert b.worker.requests.num_ending == 0
        assert await b.num_queued() == 0
        assert len(await b.records()) == 1
