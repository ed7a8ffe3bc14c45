"""Spans of telemetry in the traces of requests: from the outbox to the table."""

from __future__ import annotations

import re
from collections.abc import Sequence

from millrace.runtime.clock import Clock
from millrace.runtime.tracing import Span, SpanEvent, SpanKind, TraceContext, Tracing, record_span
from millrace.schemas.records import RequestRecord
from millrace.telemetry.sink.batches import Row

# A batch has thousands of rows: at most so many traced requests get their own span, and so many a
# link from the batch's span.
_MAX_SPANS = 512
_MAX_LINKS = 128
_NS_PER_MS = 1_000_000
# Any service may have written a record: one with another id is stored, but gets no span.
_TRACE_ID = re.compile(r"[0-9a-f]{32}")


class StoredTraces:
    """Tracer of batches: a span for each batch in its own trace, and one for each traced request in
    the request's trace."""

    def __init__(self, tracing: Tracing, clock: Clock) -> None:
        self._tracing = tracing
        self._clock = clock

    def stored(self, table: str, rows: Sequence[Row], since_ns: int) -> None:
        """Record that these rows have landed; the insert began at ``since_ns``."""
        traced = [
            (row, row.record)
            for row in rows
            if isinstance(row.record, RequestRecord) and _TRACE_ID.fullmatch(row.record.trace_id)
        ]
        if not traced:
            return
        now_ns = self._clock.now_ns()
        published = [_published(record) for _, record in traced[:_MAX_SPANS]]
        batch = self._tracing.apart()
        self._tracing.tell(
            Span(
                f"store {table}",
                batch,
                0,
                since_ns,
                now_ns,
                SpanKind.CLIENT,
                {
                    "db.system.name": "clickhouse",
                    "db.operation.name": "INSERT",
                    "db.collection.name": table,
                    "db.operation.batch.size": len(rows),
                    "millrace.traced_rows": len(traced),
                },
                links=published[:_MAX_LINKS],
            )
        )
        for (row, record), above in zip(traced, published, strict=False):
            in_kafka_ns = row.message.timestamp * _NS_PER_MS
            self._tracing.tell(
                Span(
                    "store record",
                    above.anywhere(),
                    above.span_id,
                    record.done_ns,
                    now_ns,
                    SpanKind.CONSUMER,
                    {
                        "millrace.request.id": record.request_id,
                        "messaging.system": "kafka",
                        "messaging.operation.type": "process",
                        "messaging.destination.name": row.message.topic,
                    },
                    (SpanEvent("in Kafka", in_kafka_ns), SpanEvent("insert", since_ns)),
                    (batch,),
                )
            )


def _published(record: RequestRecord) -> TraceContext:
    """Return the span of the process that put the record into the outbox."""
    return record_span(TraceContext(int(record.trace_id, 16), 0, True), record.request_id)
