"""Export of spans to a collector that is present, absent, slow or unwilling."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from millrace.runtime.otlp import OtlpSink
from millrace.runtime.tracing import Span, SpanEvent, SpanKind, Tracing
from millrace.runtime.tracing_setup import open_tracing
from millrace.schemas.config import TracingConfig
from tests.support.system import DEAD_PROXIES
from tests.support.waiting import eventually
from tests.tracing.collector import Collector

_NS = 1_000_000_000


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector().running() as running:
        yield running


def _tracing(endpoint: str) -> Tracing:
    tracing = open_tracing(TracingConfig(endpoint=endpoint), "gateway", "gateway-1")
    assert tracing is not None
    return tracing


def _span(tracing: Tracing, name: str = "work") -> Span:
    context, parent_span_id = tracing.join(None)
    return Span(name, context, parent_span_id, 1 * _NS, 2 * _NS)


async def test_a_span_arrives_as_it_was_told(collector: Collector) -> None:
    tracing = _tracing(f"{collector.endpoint}/")
    first = _span(tracing)
    second = Span(
        "below",
        first.context.anywhere(),
        first.context.span_id,
        3 * _NS,
        4 * _NS,
        SpanKind.CONSUMER,
        {"text": "a", "number": 3, "share": 0.5, "yes": True, "words": ("a", "b")},
        (SpanEvent("half", 3_500_000_000, {"n": 1}),),
        (first.context,),
        "worker_lost",
    )
    tracing.tell(first)
    tracing.tell(second)
    await tracing.close()
    parent, below = collector.spans
    assert parent.name == "work"
    assert parent.trace_id == first.context.trace_name
    assert parent.parent_id == ""
    assert (parent.start_ns, parent.end_ns, parent.failed) == (1 * _NS, 2 * _NS, False)
    assert below.parent_id == parent.span_id == f"{first.context.span_id:016x}"
    assert below.kind == "consumer"
    assert below.attributes == {
        "text": "a",
        "number": 3,
        "share": 0.5,
        "yes": True,
        "words": ["a", "b"],
        "error.type": "worker_lost",
    }
    assert below.events == {"half": 3_500_000_000}
    assert below.links == [(parent.trace_id, parent.span_id)]
    assert below.failed
    resource = collector.resources[-1]
    assert resource["service.name"] == "millrace-gateway"
    assert resource["service.instance.id"] == "gateway-1"
    assert resource["service.version"]


async def test_a_collector_of_this_machine_is_reached_without_the_proxies_of_the_shell(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in DEAD_PROXIES.items():
        monkeypatch.setenv(name, value)
    tracing = _tracing(collector.endpoint)
    tracing.tell(_span(tracing))
    await tracing.close()
    assert [span.name for span in collector.spans] == ["work"]


async def test_spans_arrive_soon_without_being_asked_for(collector: Collector) -> None:
    tracing = _tracing(collector.endpoint)
    tracing.tell(_span(tracing))
    await eventually(lambda: len(collector.spans) == 1, timeout_s=5.0)
    await tracing.close()


async def test_what_a_collector_refuses_for_a_moment_is_sent_again(
    collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    collector.status = 503
    tracing = _tracing(collector.endpoint)
    with caplog.at_level(logging.DEBUG):
        tracing.tell(_span(tracing))
        await eventually(lambda: collector.num_refused == 3, timeout_s=10.0)
        collector.status = 200
        await eventually(lambda: len(collector.spans) == 1, timeout_s=10.0)
        await tracing.close()
    assert _lines(caplog) == []


async def test_a_collector_that_is_away_costs_nothing_and_is_spoken_of_once(
    collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    collector.status = 503
    num_threads = threading.active_count()
    tracing = _tracing(collector.endpoint)
    with caplog.at_level(logging.DEBUG):
        began_s = time.monotonic()
        for _ in range(10_000):
            tracing.tell(_span(tracing))
        waited_s = time.monotonic() - began_s
        await eventually(lambda: bool(_lines(caplog)), timeout_s=20.0)
        collector.status = 200
        await eventually(lambda: len(_lines(caplog)) == 2, timeout_s=20.0)
        await tracing.close()
    assert waited_s < 5.0
    spoken = [line for line in _lines(caplog) if "the trace collector" in line.message]
    assert [line.levelname for line in spoken] == ["WARNING", "INFO"]
    assert len(collector.spans) <= 4_096
    await eventually(lambda: threading.active_count() <= num_threads + 2)


def _lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [line for line in caplog.records if not line.name.startswith(("urllib3", "asyncio"))]


async def test_process_ends_at_once_without_a_collector() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        tracing = _tracing(f"http://127.0.0.1:{taken.getsockname()[1]}")
        tracing.tell(_span(tracing))
        began_s = time.monotonic()
        await tracing.close()
        assert time.monotonic() - began_s < 4.0


async def test_a_collector_that_hangs_is_waited_for_a_bounded_time(collector: Collector) -> None:
    collector.gate.clear()
    tracing = _tracing(collector.endpoint)
    for _ in range(1_000):
        tracing.tell(_span(tracing))
    began_s = time.monotonic()
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    ticking = asyncio.create_task(tick())
    await tracing.close()
    ticking.cancel()
    assert time.monotonic() - began_s < 4.0
    assert ticks > 20, "the loop went on meanwhile"


async def test_what_is_told_after_the_end_is_forgotten(collector: Collector) -> None:
    sink = OtlpSink(collector.endpoint, "millrace-gateway", "gateway-1")
    tracing = Tracing(sink)
    await tracing.close()
    tracing.tell(_span(tracing))
    assert collector.spans == []
