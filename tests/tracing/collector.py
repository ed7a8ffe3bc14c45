"""Minimal collector of traces: OTLP over HTTP, kept in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as ProtoSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status


@dataclass(frozen=True)
class ReceivedSpan:
    """Received span. ``parent_id`` is empty for the first of a trace; ``links`` are (trace,
    span)."""

    service: str
    instance: str
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: dict[str, int]
    links: list[tuple[str, str]]
    failed: bool


class Collector:
    """Collector in a thread of its own. ``status`` is the status of its answers; ``gate`` holds
    them."""

    def __init__(self) -> None:
        self.status = 200
        self.num_refused = 0
        self.gate = threading.Event()
        self.gate.set()
        self.bodies: list[bytes] = []
        self.resources: list[dict[str, Any]] = []
        self._spans: list[ReceivedSpan] = []
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def spans(self) -> list[ReceivedSpan]:
        with self._lock:
            return list(self._spans)

    def of_trace(self, trace_id: str) -> list[ReceivedSpan]:
        return sorted(
            (span for span in self.spans if span.trace_id == trace_id), key=lambda s: s.start_ns
        )

    def of_request(self, request_id: str) -> list[ReceivedSpan]:
        """Return all spans of the trace that a request is in."""
        for span in self.spans:
            if span.attributes.get("millrace.request.id") == request_id:
                return self.of_trace(span.trace_id)
        return []

    @contextmanager
    def running(self) -> Iterator[Collector]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.gate.set()
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        with self._lock:
            self.bodies.append(body)
            for group in request.resource_spans:
                resource = {one.key: _value(one.value) for one in group.resource.attributes}
                self.resources.append(resource)
                for scope in group.scope_spans:
                    self._spans += [_received(span, resource) for span in scope.spans]

    def _handler(self) -> Callable[..., BaseHTTPRequestHandler]:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.gate.wait()
                is_traces = self.path == "/v1/traces"
                if is_traces and collector.status == 200:
                    collector.take(body)
                else:
                    collector.num_refused += 1
                self.send_response(collector.status if is_traces else 404)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Log nothing."""

        return Handler


def _received(span: ProtoSpan, resource: dict[str, Any]) -> ReceivedSpan:
    return ReceivedSpan(
        service=resource["service.name"],
        instance=resource["service.instance.id"],
        name=span.name,
        kind=ProtoSpan.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower(),
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes={one.key: _value(one.value) for one in span.attributes},
        events={event.name: event.time_unix_nano for event in span.events},
        links=[(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
        failed=span.status.code == Status.STATUS_CODE_ERROR,
    )


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind) if kind else None


def tree(spans: list[ReceivedSpan]) -> str:
    """Format a trace as text, each span below its parent, in order of time."""
    known = {span.span_id for span in spans}
    start_ns = min((span.start_ns for span in spans), default=0)
    lines: list[str] = []

    def add(span: ReceivedSpan, depth: int) -> None:
        from_ms, to_ms = (span.start_ns - start_ns) / 1e6, (span.end_ns - start_ns) / 1e6
        part = span.service.removeprefix("millrace-")
        mark = f"  ! {span.attributes.get('error.type', '')}" if span.failed else ""
        label = f"{'  ' * depth}{part}: {span.name}{mark}"
        lines.append(f"{label:<56}{from_ms:9.1f} {to_ms:9.1f} ms")
        for child in spans:
            if child.parent_id == span.span_id:
                add(child, depth + 1)

    for span in spans:
        if span.parent_id not in known:
            add(span, 0)
    return "\n".join(lines)
