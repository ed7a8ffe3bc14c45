"""Spans of a scheduler: waits, attempts that fail and move, and traces that begin with it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from millrace.runtime.tracing import SpanKind, attempt_span, parse_traceparent, record_span
from millrace.scheduler.jobs.tracing import JobTraces
from millrace.scheduler.metrics import SchedulerMetrics
from millrace.schemas.control import Cancel, CancelReason
from millrace.schemas.frames import Cancelled
from millrace.schemas.jobs import Source
from tests.scheduler.world import World, job
from tests.support.scraped import exemplars_of
from tests.tracing.kept import KeptSpans, kept_tracing

CALLER = f"00-{'ab' * 16}-{'cd' * 8}-01"


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    await world.open()
    yield world
    await world.close()


@pytest.fixture
def kept(world: World) -> KeptSpans:
    tracing, kept = kept_tracing()
    scheduler = world.schedulers[0]
    context = scheduler.state
    context.traces = JobTraces(tracing, world.clock)
    return kept


async def test_a_job_waits_and_runs_in_its_caller_s_trace(world: World, kept: KeptSpans) -> None:
    published_ns = world.clock.now_ns()
    await world.client.jobs.publish(job("r1", traceparent=CALLER))
    await world.pass_s(1.0)
    worker = await world.add_worker("a")
    await world.until(lambda: "r1" in worker.running)
    queue = kept.one("queue m")
    assert queue.kind is SpanKind.CONSUMER
    assert queue.start_ns == published_ns
    assert queue.end_ns >= published_ns + 1_000_000_000
    assert [event.name for event in queue.events] == ["pulled"]
    sent = parse_traceparent(worker.running["r1"].job.traceparent)
    await worker.finish_all()
    await world.until(lambda: "run m" in kept.names)
    run = kept.one("run m")
    assert run.context == sent
    assert {f"{span.parent_span_id:016x}" for span in kept.spans} == {"cd" * 8}
    assert {span.context.trace_name for span in kept.spans} == {"ab" * 16}
    assert run.attributes["millrace.worker.id"] == worker.worker_id
    assert run.attributes["millrace.epoch"] == 1
    assert (run.error, run.links) == ("", ())
    assert len(kept.spans) == 2


async def test_a_lost_run_is_told_for_its_worker_and_the_next_has_a_link_to_it(
    world: World, kept: KeptSpans
) -> None:
    await world.client.jobs.publish(job("r1", traceparent=CALLER))
    first = await world.add_worker("a")
    await world.until(lambda: "r1" in first.running)
    await first.kill()
    second = await world.add_worker("b")
    await world.until(lambda: "r1" in second.running)
    await second.finish_all()
    await world.until(lambda: len(kept.all("run m")) == 2)
    lost, again = kept.all("run m")
    assert (lost.error, again.error) == ("worker_lost", "")
    assert list(again.links) == [lost.context]
    assert (lost.attributes["millrace.epoch"], again.attributes["millrace.epoch"]) == (1, 2)
    life = kept.one("generate m")
    assert life.context == attempt_span(lost.context, "r1", 1)
    assert life.parent_span_id == lost.context.span_id
    assert life.error == "worker_lost"
    waits = kept.all("queue m")
    assert len(waits) == 2
    assert lost.end_ns == waits[1].start_ns


async def test_a_worker_that_is_full_leaves_a_run_that_was_not_taken(
    world: World, kept: KeptSpans
) -> None:
    worker = await world.add_worker("a")
    worker.rejection = "full"
    await world.client.jobs.publish(job("r1", traceparent=CALLER))
    await world.until(lambda: "run m" in kept.names)
    worker.rejection = ""
    assert kept.all("run m")[0].error == "not_taken"


async def test_what_ends_here_says_why_and_where_its_record_went(
    world: World, kept: KeptSpans
) -> None:
    worker = await world.add_worker("a")
    worker.rejection = "full"
    await world.client.jobs.publish(job("r1", traceparent=CALLER))
    await world.until(lambda: "run m" in kept.names)
    await world.client.control.cancel(Cancel(request_id="r1", reason=CancelReason.CLIENT))
    await world.until(lambda: isinstance(world.terminal("r1"), Cancelled))
    assert not worker.running
    assert kept.all("queue m")[-1].error == "cancelled"
    caller = parse_traceparent(CALLER)
    assert caller is not None
    record = kept.one("publish record")
    assert record.context == record_span(caller, "r1")
    assert record.parent_span_id == caller.span_id
    stored = world.record("r1")
    assert stored is not None
    assert stored.trace_id == "ab" * 16


@pytest.mark.parametrize("traceparent", ["", "00-garbage-01"])
async def test_a_job_without_a_trace_begins_one(
    world: World, kept: KeptSpans, traceparent: str
) -> None:
    await world.client.jobs.publish(job("r1", traceparent=traceparent))
    worker = await world.add_worker("a")
    await world.until(lambda: "r1" in worker.running)
    await worker.finish_all()
    await world.until(lambda: "job m" in kept.names)
    first = kept.one("job m")
    assert first.parent_span_id == 0
    others = [span for span in kept.spans if span is not first]
    assert len(others) == 2
    assert {span.parent_span_id for span in others} == {first.context.span_id}


async def test_a_scheduler_that_stops_tells_what_it_has(world: World, kept: KeptSpans) -> None:
    worker = await world.add_worker("a")
    await world.client.jobs.publish(job("r1"))
    await world.until(lambda: "r1" in worker.running)
    worker.rejection = "full"
    await world.client.jobs.publish(job("r2", traceparent=CALLER))
    await world.until(lambda: any(span.error == "not_taken" for span in kept.spans))
    await world.stop_scheduler()
    assert [span.error for span in kept.all("run m")][-1] == "scheduler_stopped"
    assert kept.all("queue m")[-1].error == "scheduler_stopped"
    assert "job m" not in kept.names


async def test_what_is_not_recorded_is_not_told(world: World, kept: KeptSpans) -> None:
    worker = await world.add_worker("a")
    unsampled = CALLER[:-1] + "0"
    await world.client.jobs.publish(job("r1", traceparent=unsampled))
    # A gateway decided against a trace by giving it none.
    await world.client.jobs.publish(job("r2", source=Source.HTTP), reserved=True)
    await world.until(lambda: len(worker.running) == 2)
    assert worker.running["r1"].job.traceparent == unsampled
    await worker.finish_all()
    await world.until(lambda: world.num_stored == 0)
    assert kept.spans == []


async def test_waits_on_metrics_name_their_trace(world: World) -> None:
    await world.add_worker("a")
    now_ns = world.clock.now_ns()
    await world.client.jobs.publish(job("r1", traceparent=CALLER, received_ns=now_ns))
    await world.until(lambda: bool(exemplars_of(SchedulerMetrics(world.schedulers[0]))))
    assert exemplars_of(SchedulerMetrics(world.schedulers[0])) == {
        "millrace_scheduler_queue_time_seconds_bucket": {"ab" * 16}
    }
