"""Export of spans to an OpenTelemetry collector by OTLP over HTTP, in a thread."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from importlib.metadata import version

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from millrace.runtime.addresses import exempt_loopback
from millrace.runtime.tracing import Span

_MAX_WAITING = 4_096
# A batch is encoded in one go while the event loop waits, so it is small.
_BATCH_SPANS = 128
_INTERVAL_MS = 500
# Timeout of a batch with all its attempts: the default of OTEL_EXPORTER_OTLP_TIMEOUT.
_SEND_TIMEOUT_S = 10.0
_CLOSE_TIMEOUT_S = 1.0
_POLL_S = 0.01

_RECORDED = trace.TraceFlags(trace.TraceFlags.SAMPLED)
_SCOPE = InstrumentationScope("millrace")
_WELL = trace.Status()
_FAILED = trace.Status(trace.StatusCode.ERROR)

logger = logging.getLogger(__name__)


class _LoggedExporter(SpanExporter):
    """Exporter that logs once when the collector is unreachable, and once when it is back."""

    def __init__(self, exporter: OTLPSpanExporter) -> None:
        self._exporter = exporter
        self.is_unreachable = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        is_unreachable = result is not SpanExportResult.SUCCESS
        if is_unreachable and not self.is_unreachable:
            logger.warning("the trace collector accepts no spans; they are lost until it does")
        elif self.is_unreachable and not is_unreachable:
            logger.info("the trace collector accepts spans again")
        self.is_unreachable = is_unreachable
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()  # type: ignore[no-untyped-call]


class OtlpSink:
    """Span sink over OTLP. See ``runtime.tracing.SpanSink``.

    Spans wait in a bounded queue, which drops the oldest while the collector is unreachable or
    slow. A thread encodes and sends them. The environment variables ``OTEL_EXPORTER_OTLP_HEADERS``
    and the like, and ``OTEL_RESOURCE_ATTRIBUTES``, apply.
    """

    def __init__(self, endpoint: str, service: str, instance_id: str) -> None:
        # The exporter logs every attempt. ``_LoggedExporter`` logs the change once.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        exempt_loopback()
        url = f"{endpoint.rstrip('/')}/v1/traces"
        self._exporter = _LoggedExporter(OTLPSpanExporter(endpoint=url, timeout=_SEND_TIMEOUT_S))
        self._resource = Resource.create(
            {
                "service.name": service,
                "service.instance.id": instance_id,
                "service.version": version("millrace"),
            }
        )
        self._processor = BatchSpanProcessor(
            self._exporter,
            max_queue_size=_MAX_WAITING,
            schedule_delay_millis=_INTERVAL_MS,
            max_export_batch_size=_BATCH_SPANS,
        )

    def put(self, span: Span) -> None:
        context = span.context
        attributes = dict(span.attributes)
        if span.error:
            attributes["error.type"] = span.error
        # An ended span as a ReadableSpan costs a fraction of a live span.
        told = ReadableSpan(
            span.name,
            context=_place(context.trace_id, context.span_id),
            parent=_place(context.trace_id, span.parent_span_id) if span.parent_span_id else None,
            resource=self._resource,
            attributes=attributes,
            events=[Event(event.name, event.attributes, event.at_ns) for event in span.events],
            links=[trace.Link(_place(link.trace_id, link.span_id)) for link in span.links],
            kind=trace.SpanKind[span.kind.name],
            status=_FAILED if span.error else _WELL,
            start_time=span.start_ns,
            end_time=max(span.end_ns, span.start_ns),
            instrumentation_scope=_SCOPE,
        )
        self._processor.on_end(told)

    async def close(self) -> None:
        """Send pending spans for a bounded time; at once if the collector is unreachable."""
        if self._exporter.is_unreachable:
            self._exporter.shutdown()
        # Do not join the thread: it may hang on the network.
        closing = threading.Thread(target=self._processor.shutdown, name="close", daemon=True)
        closing.start()
        give_up_s = time.monotonic() + _CLOSE_TIMEOUT_S
        while closing.is_alive():
            if time.monotonic() > give_up_s:
                logger.warning("some trace spans were not sent")
                return
            await asyncio.sleep(_POLL_S)


def _place(trace_id: int, span_id: int) -> trace.SpanContext:
    return trace.SpanContext(trace_id, span_id, is_remote=True, trace_flags=_RECORDED)
