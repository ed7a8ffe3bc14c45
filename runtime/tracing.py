"""Distributed traces: W3C Trace Context, and the spans that a part records.

A part that traces has a ``Tracing``. Without ``tracing.endpoint`` it is None, and the exporter is
not imported. Spans are recorded when they are over. Their ids can derive from names that other
parts know, so a span can have a parent or a link whose id was never sent. No span contains a
prompt, an answer or a tenant.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple, Protocol

HEADER = "traceparent"

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_LOW_64_BITS = (1 << 64) - 1
_SAMPLED = 1

Value = str | bool | int | float | Sequence[str]


class TraceContext(NamedTuple):
    """Place of a span: trace id (128 bits), span id (64 bits), and whether it is recorded."""

    trace_id: int
    span_id: int
    is_recorded: bool

    @property
    def trace_name(self) -> str:
        """Trace id in the usual notation."""
        return f"{self.trace_id:032x}"

    @property
    def traceparent(self) -> str:
        """Header value for other processes, whose spans become children of this one."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.is_recorded):02x}"

    def at(self, *names: str | int) -> TraceContext:
        """Return the span of this trace with these names, the same in every process."""
        seed = f"{self.trace_id:032x}/{'/'.join(map(str, names))}"
        return self._replace(span_id=_digest(seed, 8))

    def anywhere(self) -> TraceContext:
        """Return a span of this trace with a random id."""
        return self._replace(span_id=random.getrandbits(64) or 1)


def attempt_span(above: TraceContext, request_id: str, epoch: int) -> TraceContext:
    """Return the span of a run on a worker, to which later runs link."""
    return above.at("life", request_id, epoch)


def record_span(above: TraceContext, request_id: str) -> TraceContext:
    """Return the span of publishing a request's record, the parent of telemetry's spans."""
    return above.at("record", request_id)


def parse_traceparent(text: str) -> TraceContext | None:
    """Parse a caller's span; None if it is invalid, which counts as absent."""
    found = _TRACEPARENT.fullmatch(text)
    if found is None:
        return None
    version, trace, span, flags, rest = found.groups()
    trace_id, span_id = int(trace, 16), int(span, 16)
    if version == "ff" or (version == "00" and rest) or not (trace_id and span_id):
        return None
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & _SAMPLED))


def recorded_trace_id(traceparent: str) -> str:
    """Return the id of a recorded trace; empty if there is none."""
    context = parse_traceparent(traceparent) if traceparent else None
    return context.trace_name if context is not None and context.is_recorded else ""


class SpanKind(Enum):
    """Side of an exchange that a span describes."""

    INTERNAL = "internal"
    SERVER = "server"
    CLIENT = "client"
    PRODUCER = "producer"
    CONSUMER = "consumer"


class SpanEvent(NamedTuple):
    """Event within a span, at a time of UTC epoch in ns."""

    name: str
    at_ns: int
    attributes: Mapping[str, Value] = {}


class Span(NamedTuple):
    """Finished span, from ``start_ns`` to ``end_ns`` (UTC epoch).

    ``parent_span_id`` is 0 for the first span of a trace. ``error`` is a word for the reason of a
    failure.
    """

    name: str
    context: TraceContext
    parent_span_id: int
    start_ns: int
    end_ns: int
    kind: SpanKind = SpanKind.INTERNAL
    attributes: Mapping[str, Value] = {}
    events: Sequence[SpanEvent] = ()
    links: Sequence[TraceContext] = ()
    error: str = ""


class SpanSink(Protocol):
    """Sink of spans. ``put`` never waits and never raises."""

    def put(self, span: Span) -> None: ...

    async def close(self) -> None:
        """Send pending spans within a bounded time."""


class Tracing:
    """Recorder of a part's spans. The process owns it and closes it last."""

    def __init__(self, sink: SpanSink, sample_ratio: float = 1.0) -> None:
        self._sink = sink
        self._sampled_below = round(sample_ratio * (_LOW_64_BITS + 1))

    def join(self, traceparent: str | None) -> tuple[TraceContext, int]:
        """Return a span for a caller's request, and its parent's id.

        The span is in the caller's trace and recorded if that is. Without a caller it is the first
        span (parent 0) of a new trace, recorded by ``sample_ratio``.
        """
        caller = parse_traceparent(traceparent) if traceparent else None
        if caller is not None:
            return caller.anywhere(), caller.span_id
        return self._first(random.getrandbits(128) or 1).anywhere(), 0

    def apart(self) -> TraceContext:
        """Return the first span of a new trace that is always recorded.

        It is for work done for many recorded traces at once.
        """
        return TraceContext(random.getrandbits(128) or 1, 0, True).anywhere()

    def named(self, *names: str | int) -> TraceContext:
        """Return the first span of the trace with these names, the same in every process."""
        return self._first(_digest("/".join(map(str, names)), 16)).at("first")

    def _first(self, trace_id: int) -> TraceContext:
        # Decided by the trace id alone, so all processes decide alike.
        is_recorded = trace_id & _LOW_64_BITS < self._sampled_below
        return TraceContext(trace_id, 0, is_recorded)

    def tell(self, span: Span) -> None:
        """Record a finished span if its trace is recorded."""
        if span.context.is_recorded:
            self._sink.put(span)

    async def close(self) -> None:
        """Send pending spans within a bounded time."""
        await self._sink.close()


def _digest(seed: str, num_bytes: int) -> int:
    digest = hashlib.blake2b(seed.encode(), digest_size=num_bytes).digest()
    return int.from_bytes(digest) or 1
