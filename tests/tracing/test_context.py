"""Context of a span: W3C Trace Context, derived ids, and the decision to record."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.bus import codec
from millrace.bus.jobs.decoding import read_job
from millrace.runtime.tracing import (
    Span,
    TraceContext,
    attempt_span,
    parse_traceparent,
    record_span,
    recorded_trace_id,
)
from millrace.runtime.tracing_setup import open_tracing
from millrace.schemas.config import TracingConfig
from millrace.schemas.errors import ConfigError
from millrace.schemas.jobs import Job
from tests.tracing.kept import kept_tracing

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GOOD = f"00-{TRACE}-{SPAN}-01"


def test_a_traceparent_is_read_and_written() -> None:
    context = parse_traceparent(GOOD)
    assert context == TraceContext(int(TRACE, 16), int(SPAN, 16), True)
    assert context.traceparent == GOOD
    assert context.trace_name == TRACE
    assert parse_traceparent(f"00-{TRACE}-{SPAN}-00") == context._replace(is_recorded=False)
    assert parse_traceparent(f"00-{TRACE}-{SPAN}-03") == context
    assert parse_traceparent(f"cc-{TRACE}-{SPAN}-01-what-comes-later") == context


@pytest.mark.parametrize(
    "text",
    [
        "",
        "garbage",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f" {GOOD}",
        f"{GOOD}\n",
        f"00-{TRACE}-{SPAN}-0g",
    ],
)
def test_what_is_no_traceparent_is_as_if_it_were_not_there(text: str) -> None:
    assert parse_traceparent(text) is None
    assert recorded_trace_id(text) == ""
    tracing, _ = kept_tracing()
    context, parent_span_id = tracing.join(text)
    assert parent_span_id == 0
    assert context.trace_name != TRACE


@settings(max_examples=50)
@given(st.text(max_size=80))
def test_no_text_breaks_the_reader(text: str) -> None:
    context = parse_traceparent(text)
    assert context is None or context.trace_id > 0


def test_a_record_has_the_id_of_a_trace_that_is_recorded() -> None:
    assert recorded_trace_id(GOOD) == TRACE
    assert recorded_trace_id(f"00-{TRACE}-{SPAN}-00") == ""


def test_a_job_is_of_the_trace_of_its_message_however_long_that_is() -> None:
    payload = codec.encode(Job(request_id="r", model="demo", prompt="p"))
    later = f"cc-{TRACE}-{SPAN}-01-{'x' * 5_000}"
    for header, kept in ((GOOD, GOOD), (later, GOOD), ("garbage", ""), (None, "")):
        job = read_job("jobs.demo.free", payload, codec.MSGPACK, 1, header)
        assert job.traceparent == kept


def test_names_lead_every_part_to_the_same_span() -> None:
    above = parse_traceparent(GOOD)
    assert above is not None
    elsewhere = above.anywhere()
    assert attempt_span(above, "r1", 2) == attempt_span(elsewhere, "r1", 2)
    assert record_span(above, "r1") == record_span(elsewhere, "r1")
    several = {
        attempt_span(above, "r1", 1),
        attempt_span(above, "r1", 2),
        attempt_span(above, "r2", 1),
        above,
    }
    assert len(several | {record_span(above, "r1")}) == 5


def test_a_caller_s_trace_is_gone_on_with_as_the_caller_decided() -> None:
    for ratio in (0.0, 1.0):
        tracing, kept = kept_tracing(ratio)
        context, parent_span_id = tracing.join(GOOD)
        assert (context.trace_name, f"{parent_span_id:016x}") == (TRACE, SPAN)
        assert context.is_recorded
        not_recorded, _ = tracing.join(f"00-{TRACE}-{SPAN}-00")
        assert not not_recorded.is_recorded
        tracing.tell(Span("a", context, parent_span_id, 1, 2))
        tracing.tell(Span("b", not_recorded, parent_span_id, 1, 2))
        assert kept.names == ["a"]


def test_a_share_of_the_traces_that_begin_here_is_recorded() -> None:
    for ratio, low, high in ((0.0, 0, 0), (0.25, 380, 620), (1.0, 2_000, 2_000)):
        tracing, _ = kept_tracing(ratio)
        recorded = [tracing.named("job", number).is_recorded for number in range(2_000)]
        assert low <= sum(recorded) <= high
        again, _ = kept_tracing(ratio)
        assert recorded == [again.named("job", number).is_recorded for number in range(2_000)]


def test_without_an_endpoint_nothing_that_traces_is_imported() -> None:
    # The client of Redis imports OpenTelemetry's metrics by itself where it finds them.
    script = """
import sys
import millrace.gateway.__main__, millrace.scheduler.__main__
import millrace.workers.__main__, millrace.telemetry.__main__
from millrace.runtime.tracing_setup import open_tracing
from millrace.schemas.config import TracingConfig
assert open_tracing(TracingConfig(), "gateway", "g") is None
tracers = (
    "opentelemetry.sdk.trace", "opentelemetry.exporter", "millrace.runtime.otlp", "google.protobuf"
)
assert not [name for name in sys.modules if name.startswith(tracers)]
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (TracingConfig(endpoint="127.0.0.1:4318"), "endpoint"),
        (TracingConfig(endpoint="grpc://127.0.0.1:4317"), "endpoint"),
        (TracingConfig(endpoint="http://127.0.0.1:4318", sample_ratio=1.5), "sample_ratio"),
    ],
)
def test_settings_that_make_no_sense_are_named(config: TracingConfig, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        open_tracing(config, "gateway", "g")
