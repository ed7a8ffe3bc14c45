"""Spans of telemetry for the records of traced requests."""

from __future__ import annotations

import random

import msgspec
from aiokafka import ConsumerRecord

from millrace.bus import subjects
from millrace.runtime.tracing import TraceContext, record_span
from millrace.schemas.records import Record
from millrace.telemetry.sink.batches import Row
from millrace.telemetry.sink.tracing import StoredTraces
from tests.support.manual_clock import ManualClock
from tests.telemetry.records import delivery_record, request_record
from tests.tracing.kept import kept_tracing

_TOPIC = subjects.RECORD_TOPICS[0]


def _row(record: Record, in_kafka_ms: int = 0) -> Row:
    message = ConsumerRecord(_TOPIC, 0, 0, in_kafka_ms, 0, None, b"", None, 0, 0, ())
    return Row(record, 1, message)


def _traced(number: int) -> Record:
    trace_id = f"{random.Random(number).getrandbits(128):032x}"
    return msgspec.structs.replace(request_record(number), trace_id=trace_id)


def test_a_stored_record_is_told_in_its_request_s_trace_and_its_batch_apart() -> None:
    tracing, kept = kept_tracing(sample_ratio=0.0)
    clock = ManualClock()
    now_ns = clock.now_ns()
    traced = msgspec.structs.replace(request_record(1, done_ns=now_ns - 500), trace_id="ab" * 16)
    rows = [_row(traced, (now_ns - 200) // 1_000_000), _row(request_record(2))]
    StoredTraces(tracing, clock).stored("requests", rows, now_ns - 100)
    batch, record = kept.spans
    above = record_span(TraceContext(int("ab" * 16, 16), 0, True), traced.request_id)
    assert record.context.trace_id == above.trace_id
    assert record.parent_span_id == above.span_id
    assert (record.start_ns, record.end_ns) == (now_ns - 500, now_ns)
    assert [event.name for event in record.events] == ["in Kafka", "insert"]
    assert list(record.links) == [batch.context]
    assert list(batch.links) == [above]
    assert batch.context.trace_id != above.trace_id
    assert batch.attributes["db.operation.batch.size"] == 2
    assert batch.attributes["millrace.traced_rows"] == 1


def test_rows_without_a_trace_cost_nothing() -> None:
    tracing, kept = kept_tracing()
    rows = [_row(request_record(1)), _row(delivery_record(2))]
    StoredTraces(tracing, ManualClock()).stored("requests", rows, 1)
    assert kept.spans == []


def test_a_large_batch_is_told_in_part() -> None:
    tracing, kept = kept_tracing()
    rows = [_row(_traced(number)) for number in range(3_000)]
    StoredTraces(tracing, ManualClock()).stored("requests", rows, 1)
    batch = kept.one("store requests")
    assert len(batch.links) == 128
    assert batch.attributes["millrace.traced_rows"] == 3_000
    assert len(kept.spans) == 1 + 512
