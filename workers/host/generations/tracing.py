"""Spans of an attempt on this worker: pull, prefill, first token, decode, record."""

from __future__ import annotations

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
from millrace.schemas.control import Dispatch
from millrace.schemas.frames import Usage
from millrace.schemas.records import Status
from millrace.schemas.transfer import KvSource
from millrace.workers.host.generations.generation import Generation


class RunTrace:
    """Trace of one attempt, from its dispatch here to its end here.

    Its span is exported at the end, and the prefill's span as soon as the prefill is over. If the
    worker is killed, the scheduler exports the attempt's span instead, under the same id.
    """

    def __init__(self, tracing: Tracing, clock: Clock, worker_id: str, dispatch: Dispatch) -> None:
        above = parse_traceparent(dispatch.job.traceparent)
        assert above is not None
        job = dispatch.job
        self._tracing = tracing
        self._clock = clock
        self._above = above
        self._attempt = attempt_span(above, job.request_id, dispatch.epoch)
        self._links = [
            attempt_span(above, job.request_id, one.epoch) for one in dispatch.attempts[-1:]
        ]
        self._events: list[SpanEvent] = []
        self._is_finished = False
        self._attributes: dict[str, Value] = {
            "gen_ai.operation.name": "embeddings" if job.pooling else "text_completion",
            "gen_ai.request.model": job.model,
            "millrace.request.id": job.request_id,
            "millrace.worker.id": worker_id,
            "millrace.epoch": dispatch.epoch,
        }

    def add_event(self, name: str) -> None:
        """Add an event with the current time."""
        self._events.append(SpanEvent(name, self._clock.now_ns()))

    def end_prefill(self, generation: Generation) -> None:
        """Record that the prompt is computed: the first token of this attempt exists."""
        self._events.append(SpanEvent("first token", generation.timing.first_token_ns))
        self._add_prefill(generation, generation.timing.first_token_ns)

    def finish(self, generation: Generation) -> None:
        """Export the span: the attempt has ended, or another worker continues it."""
        if self._is_finished:
            return
        self._is_finished = True
        outcome, usage = generation.outcome, generation.usage() or Usage()
        timing = generation.timing
        end_ns = timing.done_ns if outcome is not None else self._clock.now_ns()
        if timing.first_token_ns:
            if timing.last_token_ns > timing.first_token_ns:
                self._add_decode(generation)
        elif timing.started_ns:
            self._add_prefill(generation, end_ns)
        attributes: dict[str, Value] = {
            **self._attributes,
            "gen_ai.response.model": generation.job.model,
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "millrace.resumed_tokens": generation.output.num_resumed,
            "millrace.preemptions": generation.accounting.num_preemptions,
        }
        if generation.kv_source is not None:
            attributes |= _pull_attributes(generation, generation.kv_source)
        error = ""
        if outcome is None:
            error = "taken_over"
        elif outcome.finish_reason is not None:
            reason = generation.finish_reason or outcome.finish_reason
            attributes["gen_ai.response.finish_reasons"] = (reason.value,)
        elif outcome.status is not Status.DONE:
            error = outcome.error_code
        verb = "generate" if generation.job.pooling is None else "embed"
        self._tracing.tell(
            Span(
                f"{verb} {generation.job.model}",
                self._attempt,
                self._above.span_id,
                timing.accepted_ns,
                end_ns,
                SpanKind.SERVER,
                attributes,
                self._events,
                self._links,
                error,
            )
        )

    def record_published(self, generation: Generation) -> None:
        """Export the span of the record, which is now in the outbox."""
        context = record_span(self._attempt, generation.request_id)
        begin_ns, end_ns = generation.timing.done_ns, self._clock.now_ns()
        self._add("publish record", generation, begin_ns, end_ns, {}, context, SpanKind.PRODUCER)

    def _add(
        self,
        name: str,
        generation: Generation,
        begin_ns: int,
        end_ns: int,
        attributes: dict[str, Value],
        context: TraceContext | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> None:
        """Export a span within the attempt."""
        attributes = {"millrace.request.id": generation.request_id, **attributes}
        context = context or self._attempt.anywhere()
        above = self._attempt.span_id
        self._tracing.tell(Span(name, context, above, begin_ns, end_ns, kind, attributes))

    def _add_prefill(self, generation: Generation, end_ns: int) -> None:
        source, timing = generation.kv_source, generation.timing
        if source is not None and timing.pulled_ns:
            # Time from the request for the blocks until the last block arrived.
            pulled = _pull_attributes(generation, source)
            self._add("kv pull", generation, timing.accepted_ns, timing.pulled_ns, pulled)
        attributes: dict[str, Value] = {
            "gen_ai.usage.input_tokens": len(generation.prompt_token_ids),
            "gen_ai.usage.cache_read.input_tokens": generation.accounting.num_cached_tokens,
            "millrace.resumed_tokens": generation.output.num_resumed,
        }
        self._add("prefill", generation, timing.started_ns, end_ns, attributes)

    def _add_decode(self, generation: Generation) -> None:
        timing, output = generation.timing, generation.output
        made = {"gen_ai.usage.output_tokens": output.num_completion_tokens - output.num_resumed}
        self._add("decode", generation, timing.first_token_ns, timing.last_token_ns, {**made})


def _pull_attributes(generation: Generation, source: KvSource) -> dict[str, Value]:
    return {
        "millrace.kv.source": source.worker_id,
        "millrace.kv.pulled_tokens": generation.accounting.num_pulled_tokens,
    }


class RunTraces:
    """Factory of traces for the runs of one worker."""

    def __init__(self, tracing: Tracing, clock: Clock, worker_id: str) -> None:
        self._tracing = tracing
        self._clock = clock
        self._worker_id = worker_id

    def start(self, dispatch: Dispatch) -> RunTrace | None:
        """Return the trace of a run; None if it is not recorded."""
        traceparent = dispatch.job.traceparent
        above = parse_traceparent(traceparent) if traceparent else None
        if above is None or not above.is_recorded:
            return None
        return RunTrace(self._tracing, self._clock, self._worker_id, dispatch)
