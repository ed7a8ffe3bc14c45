"""Trace spans of a job in a scheduler: each wait, and each run on a worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from millrace.bus import subjects
from millrace.runtime.clock import Clock
from millrace.runtime.tracing import (
    Span,
    SpanEvent,
    SpanKind,
    TraceContext,
    Tracing,
    Value,
    attempt_span,
    parse_traceparent,
    record_span,
)
from millrace.schemas.jobs import Job, Source

_WORKER_LOST = "worker_lost"


@dataclass(slots=True)
class _Run:
    context: TraceContext
    since_ns: int
    worker_id: str
    num_cached_tokens: int
    epoch: int = 0
    num_resumed_tokens: int = 0
    events: list[SpanEvent] = field(default_factory=list)


class JobTrace:
    """Trace of one job, from when the queue stored it: waits and runs alternate.

    Spans that a killed scheduler had not recorded are lost.
    """

    def __init__(
        self,
        tracing: Tracing,
        clock: Clock,
        above: TraceContext,
        job: Job,
        *,
        num_deliveries: int,
        stored_ns: int,
        is_first: bool,
    ) -> None:
        """Start a trace below ``above``; ``is_first``: the root span is recorded here, too."""
        now_ns = clock.now_ns()
        self._tracing = tracing
        self._clock = clock
        self._above = above
        self._is_first = is_first
        self._name = job.model
        self._verb = "generate" if job.pooling is None else "embed"
        self._request_id = job.request_id
        self._since_ns = stored_ns or job.received_ns or now_ns
        self._attributes: dict[str, Value] = {
            "gen_ai.request.model": job.model,
            "millrace.request.id": job.request_id,
            "millrace.tier": job.tier.value,
            "millrace.deliveries": num_deliveries,
        }
        self._waits_since_ns: int | None = self._since_ns
        self._pulled = [SpanEvent("pulled", now_ns)]
        self._run: _Run | None = None
        self._last_run: TraceContext | None = None

    def start_run(self, worker_id: str, num_cached_tokens: int) -> None:
        """Start a run at a worker, with the number of prompt tokens expected in its cache."""
        self._stop_waiting()
        self._run = _Run(self._above.anywhere(), self._clock.now_ns(), worker_id, num_cached_tokens)

    def mark_sent(self, epoch: int, num_resumed_tokens: int) -> str:
        """Record the dispatch and return the ``traceparent`` of the worker's spans."""
        run = self._run
        assert run is not None
        run.epoch, run.num_resumed_tokens = epoch, num_resumed_tokens
        run.events.append(SpanEvent("sent", self._clock.now_ns()))
        return run.context.traceparent

    def worker_lost(self, *, began: bool) -> None:
        """Record the loss of the worker, and the span of a run that began there."""
        run = self._run
        if run is not None and began:
            span = attempt_span(run.context, self._request_id, run.epoch)
            sent_ns = run.events[0].at_ns
            self._record_run(f"{self._verb} {self._name}", run, span, run.context, sent_ns)
        self.finish_run(_WORKER_LOST)

    def finish_run(self, error: str = "") -> None:
        """End the run; the job waits again unless ``finish`` follows."""
        run, self._run = self._run, None
        if run is None:
            return
        links = () if self._last_run is None else (self._last_run,)
        self._record_run(
            f"run {self._name}", run, run.context, self._above, run.since_ns, links, error
        )
        self._last_run = run.context
        self._waits_since_ns = self._clock.now_ns()

    def _record_run(
        self,
        name: str,
        run: _Run,
        context: TraceContext,
        above: TraceContext,
        since_ns: int,
        links: Sequence[TraceContext] = (),
        error: str = _WORKER_LOST,
    ) -> None:
        span = self._span(name, context, above.span_id, since_ns, SpanKind.CLIENT, error)
        of_run: dict[str, Value] = {
            "millrace.worker.id": run.worker_id,
            "millrace.epoch": run.epoch,
            "millrace.expected_cached_tokens": run.num_cached_tokens,
            "millrace.resumed_tokens": run.num_resumed_tokens,
        }
        attributes = {**self._attributes, **of_run}
        self._tracing.tell(span._replace(attributes=attributes, events=run.events, links=links))

    def _span(
        self,
        name: str,
        context: TraceContext,
        parent_span_id: int,
        since_ns: int,
        kind: SpanKind,
        error: str,
    ) -> Span:
        """Make a span of this job that ends now."""
        now_ns = self._clock.now_ns()
        attributes = self._attributes
        return Span(name, context, parent_span_id, since_ns, now_ns, kind, attributes, error=error)

    def stop(self) -> None:
        """End the trace here. The next scheduler that gets the job records the rest."""
        self._is_first = False
        self.finish("scheduler_stopped")

    def finish(self, error: str = "") -> None:
        """End the trace: the job has ended, or another scheduler has it."""
        if self._run is not None:
            self.finish_run(error)
            self._waits_since_ns = None
        else:
            self._stop_waiting(error)
        if self._is_first:
            self._is_first = False
            name, kind = f"job {self._name}", SpanKind.CONSUMER
            self._tracing.tell(self._span(name, self._above, 0, self._since_ns, kind, error))

    def _stop_waiting(self, error: str = "") -> None:
        since_ns, self._waits_since_ns = self._waits_since_ns, None
        if since_ns is None:
            return
        pulled, self._pulled = self._pulled, []
        above, name = self._above, f"queue {self._name}"
        span = self._span(name, above.anywhere(), above.span_id, since_ns, SpanKind.CONSUMER, error)
        of_queue: dict[str, Value] = {
            "messaging.system": "nats",
            "messaging.operation.type": "receive",
            "messaging.destination.name": subjects.JOBS_STREAM,
        }
        self._tracing.tell(
            span._replace(attributes={**self._attributes, **of_queue}, events=pulled)
        )


class JobTraces:
    """Traces of one scheduler's jobs."""

    def __init__(self, tracing: Tracing, clock: Clock) -> None:
        self._tracing = tracing
        self._clock = clock

    def start(self, job: Job, num_deliveries: int, stored_ns: int) -> tuple[Job, JobTrace | None]:
        """Return the job to continue, and its trace if it is recorded.

        A job without a trace that no gateway decided on gets one, the same at each delivery.
        """
        above = parse_traceparent(job.traceparent) if job.traceparent else None
        is_first = above is None and (job.source is Source.NATS or not job.reply)
        if is_first:
            above = self._tracing.named(job.request_id, job.received_ns)
        if above is None or not above.is_recorded:
            return job, None
        trace = JobTrace(
            self._tracing,
            self._clock,
            above,
            job,
            num_deliveries=num_deliveries,
            stored_ns=stored_ns,
            is_first=is_first,
        )
        return replace(job, traceparent=above.traceparent) if is_first else job, trace

    def recorded(self, job: Job, since_ns: int) -> None:
        """Record the span of publishing the record of a job that no worker answered."""
        above = parse_traceparent(job.traceparent) if job.traceparent else None
        if above is not None:
            self._tracing.tell(
                Span(
                    "publish record",
                    record_span(above, job.request_id),
                    above.span_id,
                    since_ns,
                    self._clock.now_ns(),
                    SpanKind.PRODUCER,
                    {"millrace.request.id": job.request_id},
                )
            )
