"""Trace of a request at the gateway: the request, its jobs, its end.

The names are those of OpenTelemetry's conventions for HTTP and generative AI.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec.structs import replace

from millrace.bus import subjects
from millrace.gateway.errors import Refusal
from millrace.gateway.streams.choice import Choice
from millrace.gateway.transport.http import Headers, Send, with_headers
from millrace.registry.requests.generation_request import GenerationRequest
from millrace.runtime.clock import Clock
from millrace.runtime.tracing import (
    HEADER,
    Span,
    SpanEvent,
    SpanKind,
    TraceContext,
    Tracing,
    Value,
    parse_traceparent,
)
from millrace.schemas.config import GatewayConfig
from millrace.schemas.frames import Usage
from millrace.schemas.jobs import Job

TRACEPARENT = HEADER.encode()
_OPERATIONS = {"/v1/completions": "text_completion", "/v1/embeddings": "embeddings"}
_CHAT = "chat"
_FAILED_FROM = 500
_REFUSED_FROM = 400
_CLIENT_LEFT = 499
_NS_PER_S = 1e9


class TracedResponse(Protocol):
    """Subset of ``gateway.request.response_stream.ResponseStream`` that a trace reports."""

    choices: list[Choice]
    trace: RequestTrace | None

    @property
    def request_id(self) -> str: ...

    @property
    def usage(self) -> Usage: ...

    @property
    def refusal(self) -> Refusal | None: ...


class RequestTrace:
    """Trace of one client request, from its receipt to ``finish``."""

    def __init__(
        self,
        tracing: Tracing,
        clock: Clock,
        config: GatewayConfig,
        context: TraceContext,
        parent_span_id: int,
        route: str,
        method: str,
    ) -> None:
        self.context = context
        self._tracing = tracing
        self._clock = clock
        self._parent_span_id = parent_span_id
        self._since_ns, self._since_s = clock.now_ns(), clock.monotonic()
        self._operation = _OPERATIONS.get(route, _CHAT)
        self._name = f"{method} {route}"
        self._attributes: dict[str, Value] = {
            "http.request.method": method,
            "http.route": route,
            "server.address": config.host,
            "server.port": config.port,
            "gen_ai.operation.name": self._operation,
            "gen_ai.provider.name": "millrace",
        }
        self._response: TracedResponse | None = None
        self._is_over = False

    # --- headers ---

    @property
    def headers(self) -> Headers:
        """Return the headers by which the client finds the trace."""
        return [
            (b"traceparent", self.context.traceparent.encode()),
            (b"x-trace-id", self.context.trace_name.encode()),
        ]

    def with_headers(self, send: Send) -> Send:
        """Return a ``send`` that adds the trace's headers to the response."""
        return with_headers(send, lambda own: [*own, *self.headers])

    def add_context(self, job: Job) -> Job:
        """Return the job with its place in the trace, below the span in which it is
        ``published``.
        """
        return replace(job, traceparent=self._publishing(job).traceparent)

    # --- events ---

    def note_request(self, request: GenerationRequest) -> None:
        """Note a request for an existing model."""
        self.note_model(request.model, request.model_requested)
        sampling, attributes = request.sampling, self._attributes
        for name in ("temperature", "top_p"):
            value = getattr(sampling, name)
            if value is not None:
                attributes[f"gen_ai.request.{name}"] = value
        attributes["gen_ai.request.choice.count"] = sampling.n
        if sampling.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = sampling.max_tokens
        if request.route_reason:
            attributes["millrace.route_reason"] = request.route_reason

    def note_model(self, model: str, requested: str = "") -> None:
        """Note the model that answers, and the requested name."""
        self._name = f"{self._operation} {model}"
        self._attributes["gen_ai.request.model"] = requested or model
        self._attributes["gen_ai.response.model"] = model

    def record_publish(self, jobs: Sequence[Job], since_ns: int, error: str = "") -> None:
        """Record that the queue has stored these jobs, or the error of a refusal."""
        now_ns = self._clock.now_ns()
        for job in jobs:
            self._tracing.tell(
                Span(
                    f"publish {job.model}",
                    self._publishing(job),
                    self.context.span_id,
                    since_ns,
                    now_ns,
                    SpanKind.PRODUCER,
                    {
                        "messaging.system": "nats",
                        "messaging.operation.type": "send",
                        "messaging.destination.name": subjects.JOBS_STREAM,
                        "millrace.request.id": job.request_id,
                    },
                    error=error,
                )
            )

    def attach_response(self, response: TracedResponse) -> None:
        """Attach the answer that the client gets."""
        self._response = response
        response.trace = self
        self._attributes["gen_ai.response.id"] = response.request_id

    def note_usage(self, usage: Usage) -> None:
        """Note the tokens of the request."""
        attributes = self._attributes
        attributes["gen_ai.usage.input_tokens"] = usage.prompt_tokens
        attributes["gen_ai.usage.cache_read.input_tokens"] = usage.cached_tokens
        attributes["gen_ai.usage.output_tokens"] = usage.completion_tokens

    def finish(self, status: int = 0, refusal: Refusal | None = None, error: str = "") -> None:
        """Finish the trace; only the first call counts. ``status`` is the HTTP status, 0 on a
        socket. ``error`` may describe the client's end if there is no refusal.
        """
        if self._is_over:
            return
        self._is_over = True
        events: list[SpanEvent] = []
        links: list[TraceContext] = []
        response, self._response = self._response, None
        if response is not None:
            response.trace = None
            self._note_answer(response, events, links)
            refusal = refusal or response.refusal
        if status:
            self._attributes["http.response.status_code"] = status
        grade = status
        if refusal is not None:
            error, grade = refusal.code, refusal.status
        elif status == _CLIENT_LEFT:
            error = "client_left"
        if grade >= _FAILED_FROM:
            error = error or str(grade)
        elif error or grade >= _REFUSED_FROM:
            # A client's own abort is no failure of ours.
            self._attributes["error.type"] = error or str(grade)
            error = ""
        self._tracing.tell(
            Span(
                self._name,
                self.context,
                self._parent_span_id,
                self._since_ns,
                self._clock.now_ns(),
                SpanKind.SERVER,
                self._attributes,
                events,
                links,
                error,
            )
        )

    def _note_answer(
        self, response: TracedResponse, events: list[SpanEvent], links: list[TraceContext]
    ) -> None:
        self.note_usage(response.usage)
        reasons = tuple(choice.reason for choice in response.choices if choice.reason)
        if reasons:
            self._attributes["gen_ai.response.finish_reasons"] = reasons
        streams = list(dict.fromkeys(choice.stream for choice in response.choices))
        self._attributes["millrace.runs"] = sum(stream.reader.num_epochs for stream in streams)
        firsts_s = [stream.delivery.first_token_s for stream in streams]
        known_s = [first_s for first_s in firsts_s if first_s is not None]
        if known_s:
            first_s = min(known_s) - self._since_s
            at_ns = self._since_ns + round(first_s * _NS_PER_S)
            events.append(SpanEvent("first token", at_ns))
            self._attributes["gen_ai.response.time_to_first_chunk"] = first_s
        # A response that was taken over began in the trace of another request.
        begun = parse_traceparent(streams[0].job.traceparent) if streams else None
        if begun is not None and begun.trace_id != self.context.trace_id:
            links.append(begun)

    def _publishing(self, job: Job) -> TraceContext:
        return self.context.at("publish", job.request_id)


class RequestTraces:
    """Factory of traces for the requests of one gateway."""

    def __init__(self, tracing: Tracing, clock: Clock, config: GatewayConfig) -> None:
        self._tracing = tracing
        self._clock = clock
        self._config = config

    def start(self, traceparent: str | None, route: str, method: str) -> RequestTrace | None:
        """Start the trace of a request, perhaps inside its caller's trace; return None if it is not
        recorded.
        """
        context, parent_span_id = self._tracing.join(traceparent)
        if not context.is_recorded:
            return None
        return RequestTrace(
            self._tracing,
            self._clock,
            self._config,
            context,
            parent_span_id,
            route,
            method,
        )
