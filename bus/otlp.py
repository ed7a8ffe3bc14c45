"""Spans to an OpenTelemetry collector, by OTLP over HTTP, off the event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from importlib.metadata import version

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from bus.tracing import Span, SpanKind, TraceContext

_MAX_WAITING = 4_096
# Small ones: a batch is encoded in one go, for which the event loop waits.
_BATCH_SPANS = 128
_INTERVAL_MS = 500
_SEND_TIMEOUT_S = 2.0
_CLOSE_TIMEOUT_S = 2.0
_POLL_S = 0.01

_KINDS = {
    SpanKind.INTERNAL: trace.SpanKind.INTERNAL,
    SpanKind.SERVER: trace.SpanKind.SERVER,
    SpanKind.CLIENT: trace.SpanKind.CLIENT,
    SpanKind.PRODUCER: trace.SpanKind.PRODUCER,
    SpanKind.CONSUMER: trace.SpanKind.CONSUMER,
}
_RECORDED = trace.TraceFlags(trace.TraceFlags.SAMPLED)
_NOWHERE = Context()
_FAILED = trace.Status(trace.StatusCode.ERROR)

logger = logging.getLogger(__name__)


class _GivenIds(IdGenerator):
    """The ids that the next span is to have."""

    def __init__(self) -> None:
        self.trace_id = 1
        self.span_id = 1

    def generate_trace_id(self) -> int:
        return self.trace_id

    def generate_span_id(self) -> int:
        return self.span_id


class _Telling(SpanExporter):
    """Says once that the collector is away, and once that it is back."""

    def __init__(self, exporter: OTLPSpanExporter) -> None:
        self._exporter = exporter
        self.is_away = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        is_away = result is not SpanExportResult.SUCCESS
        if is_away and not self.is_away:
            logger.warning("the trace collector takes no spans; they are lost until it does")
        elif self.is_away and not is_away:
            logger.info("the trace collector takes spans again")
        self.is_away = is_away
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()  # type: ignore[no-untyped-call]


class OtlpSink:
    """See ``bus.tracing.SpanSink``. Spans wait in a bounded queue, whose oldest are lost while the
    collector is away or slow; a thread of its own encodes and sends them.

    ``put`` is for one thread. Of the environment, ``OTEL_EXPORTER_OTLP_HEADERS`` and the like and
    ``OTEL_RESOURCE_ATTRIBUTES`` hold.
    """

    def __init__(self, endpoint: str, service: str, instance_id: str) -> None:
        # What it says on every attempt is said once here.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        url = f"{endpoint.rstrip('/')}/v1/traces"
        self._exporter = _Telling(OTLPSpanExporter(endpoint=url, timeout=_SEND_TIMEOUT_S))
        self._ids = _GivenIds()
        self._provider = TracerProvider(
            sampler=ALWAYS_ON,
            resource=Resource.create(
                {
                    "service.name": service,
                    "service.instance.id": instance_id,
                    "service.version": version("millrace"),
                }
            ),
            shutdown_on_exit=False,
            id_generator=self._ids,
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                self._exporter,
                max_queue_size=_MAX_WAITING,
                schedule_delay_millis=_INTERVAL_MS,
                max_export_batch_size=_BATCH_SPANS,
            )
        )
        self._tracer = self._provider.get_tracer("millrace")

    def put(self, span: Span) -> None:
        context, parent_span_id = span.context, span.parent_span_id
        self._ids.trace_id, self._ids.span_id = context.trace_id, context.span_id
        parent = _NOWHERE
        if parent_span_id:
            above = _remote(context._replace(span_id=parent_span_id))
            parent = trace.set_span_in_context(trace.NonRecordingSpan(above), _NOWHERE)
        attributes = dict(span.attributes)
        if span.error:
            attributes["error.type"] = span.error
        told = self._tracer.start_span(
            span.name,
            context=parent,
            kind=_KINDS[span.kind],
            attributes=attributes,
            links=[trace.Link(_remote(link)) for link in span.links],
            start_time=span.start_ns,
        )
        for event in span.events:
            told.add_event(event.name, event.attributes or None, event.at_ns)
        if span.error:
            told.set_status(_FAILED)
        told.end(max(span.end_ns, span.start_ns))

    async def close(self) -> None:
        """Send what waits, for a bounded time; nothing is waited for while the collector is
        away."""
        if self._exporter.is_away:
            self._exporter.shutdown()
        # A thread that is not waited for: one that hangs on the network must not keep us.
        closing = threading.Thread(target=self._provider.shutdown, name="close", daemon=True)
        closing.start()
        give_up_s = time.monotonic() + _CLOSE_TIMEOUT_S
        while closing.is_alive():
            if time.monotonic() > give_up_s:
                logger.warning("some spans were not sent")
                return
            await asyncio.sleep(_POLL_S)


def _remote(context: TraceContext) -> trace.SpanContext:
    return trace.SpanContext(
        context.trace_id, context.span_id, is_remote=True, trace_flags=_RECORDED
    )
