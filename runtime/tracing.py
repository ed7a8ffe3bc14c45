"""Distributed traces: where a span belongs (W3C Trace Context), and how a part tells what it did.

A part that traces has a ``Tracing``; without ``tracing.endpoint`` there is none, what sends spans
is not even imported, and all that is left is a look whether it is None. Spans are told when they
are over. Their ids can be derived from names that other parts know too, so a span can have a
parent or a link that nobody had to send. No prompt, no answer and no tenant is in any of them.
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
    """A span's place: its trace (128 bits), its own id (64 bits), and whether it is recorded."""

    trace_id: int
    span_id: int
    is_recorded: bool

    @property
    def trace_name(self) -> str:
        """The trace's id as everybody shows it."""
        return f"{self.trace_id:032x}"

    @property
    def traceparent(self) -> str:
        """What goes on to others, whose spans become children of this one."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.is_recorded):02x}"

    def at(self, *names: str | int) -> TraceContext:
        """The span of this trace that goes by these names, whoever tells it."""
        seed = f"{self.trace_id:032x}/{'/'.join(map(str, names))}"
        return self._replace(span_id=_digest(seed, 8))

    def anywhere(self) -> TraceContext:
        """A span of this trace that nobody else has to know."""
        return self._replace(span_id=random.getrandbits(64) or 1)


def attempt_span(above: TraceContext, request_id: str, epoch: int) -> TraceContext:
    """The span of a run on a worker, which later runs have a link to."""
    return above.at("life", request_id, epoch)


def record_span(above: TraceContext, request_id: str) -> TraceContext:
    """The span by which a request's record went into the outbox, below which telemetry tells."""
    return above.at("record", request_id)


def parse_traceparent(text: str) -> TraceContext | None:
    """The caller's span; None for what is not one, which is as if it were not there."""
    found = _TRACEPARENT.fullmatch(text)
    if found is None:
        return None
    version, trace, span, flags, rest = found.groups()
    trace_id, span_id = int(trace, 16), int(span, 16)
    if version == "ff" or (version == "00" and rest) or not (trace_id and span_id):
        return None
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & _SAMPLED))


def recorded_trace_id(traceparent: str) -> str:
    """The id of a trace that is recorded; empty if there is none."""
    context = parse_traceparent(traceparent) if traceparent else None
    return context.trace_name if context is not None and context.is_recorded else ""


class SpanKind(Enum):
    """Which side of an exchange a span tells."""

    INTERNAL = "internal"
    SERVER = "server"
    CLIENT = "client"
    PRODUCER = "producer"
    CONSUMER = "consumer"


class SpanEvent(NamedTuple):
    """Something that happened within a span, at a time of UTC epoch in ns."""

    name: str
    at_ns: int
    attributes: Mapping[str, Value] = {}


class Span(NamedTuple):
    """What is over, from ``start_ns`` to ``end_ns`` (UTC epoch). ``parent_span_id`` is 0 for the
    first span of a trace; ``error`` is why it failed, in a word."""

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
    """Where spans go. ``put`` never waits and never raises."""

    def put(self, span: Span) -> None: ...

    async def close(self) -> None:
        """Send what is there, within a bounded time."""


class Tracing:
    """What a part tells its spans to. Owned by the process, which closes it last."""

    def __init__(self, sink: SpanSink, sample_ratio: float = 1.0) -> None:
        self._sink = sink
        self._sampled_below = round(sample_ratio * (_LOW_64_BITS + 1))

    def join(self, traceparent: str | None) -> tuple[TraceContext, int]:
        """A span for a caller's request, and its parent: in the caller's trace, recorded if that
        is; else the first span (parent 0) of a trace that ``sample_ratio`` decides on."""
        caller = parse_traceparent(traceparent) if traceparent else None
        if caller is not None:
            return caller.anywhere(), caller.span_id
        return self._first(random.getrandbits(128) or 1).anywhere(), 0

    def apart(self) -> TraceContext:
        """The first span of a trace of its own that is recorded whatever the ratio, as one for
        what is done for many traces that are."""
        return TraceContext(random.getrandbits(128) or 1, 0, True).anywhere()

    def named(self, *names: str | int) -> TraceContext:
        """The first span of the trace that goes by these names: the same whoever asks."""
        return self._first(_digest("/".join(map(str, names)), 16)).at("first")

    def _first(self, trace_id: int) -> TraceContext:
        # By the trace's id alone, so that all who see it decide alike.
        is_recorded = trace_id & _LOW_64_BITS < self._sampled_below
        return TraceContext(trace_id, 0, is_recorded)

    def tell(self, span: Span) -> None:
        """A span is over; one that is not recorded is forgotten."""
        if span.context.is_recorded:
            self._sink.put(span)

    async def close(self) -> None:
        """Send what is there, within a bounded time."""
        await self._sink.close()


def _digest(seed: str, num_bytes: int) -> int:
    digest = hashlib.blake2b(seed.encode(), digest_size=num_bytes).digest()
    return int.from_bytes(digest) or 1
