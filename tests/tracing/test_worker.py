"""Spans of an attempt at a worker: prefill, first token, decode, its end, its record."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from millrace.engine.types import EngineOutput
from millrace.registry.served import ServedModel
from millrace.runtime.tracing import Span, attempt_span, parse_traceparent, record_span
from millrace.schemas.control import Cancel, CancelReason
from millrace.schemas.frames import FinishReason
from millrace.schemas.records import Attempt
from millrace.schemas.transfer import KvSource, TransferEndpoint
from millrace.workers.host.generations.tracing import RunTraces
from tests.tracing.kept import KeptSpans, kept_tracing
from tests.workers.host.conftest import demo
from tests.workers.scripted import Bench, bench

__all__ = ["demo"]

SCHEDULER = f"00-{'ab' * 16}-{'cd' * 8}-01"
_NS = 1_000_000_000
_SOURCE = KvSource(
    worker_id="w-other",
    endpoint=TransferEndpoint(layout="l", token="t", socket="/run/x"),
    num_tokens=3,
)


@pytest.fixture
async def b(demo: ServedModel) -> AsyncIterator[Bench]:
    async with bench(demo) as b:
        yield b


@pytest.fixture
def kept(b: Bench) -> KeptSpans:
    tracing, kept = kept_tracing()
    b.worker.requests._traces = RunTraces(tracing, b.clock, b.worker.worker_id)
    return kept


def _life_of(span: Span) -> int:
    return span.context.span_id


async def test_a_run_is_told_in_its_phases(b: Bench, kept: KeptSpans) -> None:
    begin_ns = b.clock.now_ns()
    earlier = Attempt(epoch=1, worker_id="other")
    await b.dispatch(b.job(traceparent=SCHEDULER), epoch=2, attempts=(earlier,))
    await b.settle(1.0)
    b.engine.emit("r1:2", [20])
    prefill = kept.one("prefill")
    assert (prefill.start_ns, prefill.end_ns) == (begin_ns, begin_ns + _NS)
    await b.settle(2.0)
    b.engine.emit("r1:2", [21], FinishReason.LENGTH)
    await b.ended()
    life, decode, record = kept.one("generate demo"), kept.one("decode"), kept.one("publish record")
    above = parse_traceparent(SCHEDULER)
    assert above is not None
    assert life.context == attempt_span(above, "r1", 2)
    assert life.parent_span_id == above.span_id
    assert list(life.links) == [attempt_span(above, "r1", 1)]
    assert record.context == record_span(above, "r1")
    assert {one.parent_span_id for one in (prefill, decode, record)} == {_life_of(life)}
    assert (life.start_ns, life.end_ns) == (begin_ns, begin_ns + 3 * _NS)
    assert (decode.start_ns, decode.end_ns) == (begin_ns + _NS, begin_ns + 3 * _NS)
    assert [(event.name, event.at_ns) for event in life.events] == [("first token", begin_ns + _NS)]
    assert life.attributes["gen_ai.usage.input_tokens"] == 3
    assert life.attributes["gen_ai.usage.output_tokens"] == 2
    assert life.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert life.attributes["millrace.worker.id"] == b.worker.worker_id
    assert life.attributes["millrace.epoch"] == 2
    assert life.error == ""
    (stored,) = await b.records()
    assert stored.trace_id == "ab" * 16


async def test_what_is_pulled_is_a_span_of_the_run(b: Bench, kept: KeptSpans) -> None:
    begin_ns = b.clock.now_ns()
    await b.dispatch(b.job(traceparent=SCHEDULER), kv_source=_SOURCE)
    await b.settle(1.0)
    b.engine.step(
        EngineOutput(
            request_id="r1:1",
            started=True,
            queued_s=0.5,
            num_cached_tokens=2,
            num_pulled_tokens=2,
            pulled_s=0.25,
        )
    )
    b.engine.emit("r1:1", [20], FinishReason.LENGTH)
    await b.ended()
    pull, life = kept.one("kv pull"), kept.one("generate demo")
    assert (pull.start_ns, pull.end_ns) == (begin_ns, begin_ns + _NS // 4)
    assert pull.parent_span_id == _life_of(life)
    for span in (pull, life):
        assert span.attributes["millrace.kv.source"] == "w-other"
        assert span.attributes["millrace.kv.pulled_tokens"] == 2


async def test_a_pull_of_which_nothing_came_has_no_span(b: Bench, kept: KeptSpans) -> None:
    await b.dispatch(b.job(traceparent=SCHEDULER), kv_source=_SOURCE)
    b.engine.emit("r1:1", [20], FinishReason.LENGTH)
    await b.ended()
    assert "kv pull" not in kept.names
    attributes = kept.one("generate demo").attributes
    assert attributes["millrace.kv.source"] == "w-other"
    assert attributes["millrace.kv.pulled_tokens"] == 0


async def test_a_run_without_a_source_says_nothing_of_one(b: Bench, kept: KeptSpans) -> None:
    await b.dispatch(b.job(traceparent=SCHEDULER))
    b.engine.emit("r1:1", [20], FinishReason.LENGTH)
    await b.ended()
    assert not any("kv" in name for name in kept.one("generate demo").attributes)


async def test_a_run_that_others_go_on_with_says_so(b: Bench, kept: KeptSpans) -> None:
    await b.dispatch(b.job(traceparent=SCHEDULER))
    b.engine.emit("r1:1", [20])
    await b.settle(0.5)
    b.engine.emit("r1:1", [21])
    superseded = Cancel(request_id="r1", reason=CancelReason.SUPERSEDED, below_epoch=2)
    await b.command(superseded)
    assert kept.names == ["prefill", "decode", "generate demo"]
    assert kept.one("generate demo").error == "taken_over"


async def test_a_lost_engine_is_an_event_of_the_run(b: Bench, kept: KeptSpans) -> None:
    await b.dispatch(b.job(traceparent=SCHEDULER))
    b.engine.emit("r1:1", [20])
    b.engine.fail("it died")
    await b.settle(1.0)
    b.engine.emit("r1:1", [21], FinishReason.STOP)
    await b.ended()
    events = [event.name for event in kept.one("generate demo").events]
    assert events == ["first token", "engine lost"]


async def test_a_run_that_is_cancelled_says_so(b: Bench, kept: KeptSpans) -> None:
    await b.dispatch(b.job(traceparent=SCHEDULER))
    await b.command(Cancel(request_id="r1", reason=CancelReason.CLIENT))
    await b.ended()
    assert kept.one("generate demo").error == "cancelled"
    assert "decode" not in kept.names


@pytest.mark.parametrize("traceparent", ["", "nonsense", SCHEDULER[:-1] + "0"])
async def test_a_run_without_a_trace_is_not_told(
    b: Bench, kept: KeptSpans, traceparent: str
) -> None:
    await b.dispatch(b.job(traceparent=traceparent))
    b.engine.emit("r1:1", [20], FinishReason.STOP)
    await b.ended()
    assert kept.spans == []
    (stored,) = await b.records()
    assert stored.trace_id == ""
