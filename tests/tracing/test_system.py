"""Trace of a request across all parts of a running system, also when a part dies."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from nats import connect as connect_nats

from millrace.bus import nats, subjects
from millrace.bus.api import Bus
from millrace.bus.job_queue import TenantQueue
from millrace.runtime.tracing import attempt_span, parse_traceparent
from millrace.schemas.config import NatsConfig
from millrace.schemas.jobs import Job, Tier
from millrace.schemas.sampling import SamplingParams
from tests.support.system import System
from tests.support.waiting import eventually
from tests.tracing.collector import Collector, ReceivedSpan, tree

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow(
        reason="starts a whole system; the other tests of this folder check the spans of each part"
    ),
]

CALLER = f"00-{'ab' * 16}-{'cd' * 8}-01"
SECRET = "What is the word that nobody may read?"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector().running() as running:
        yield running


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("traced")
    settings = folder / "settings.yaml"
    settings.write_text(json.dumps({"tracing": {"endpoint": collector.endpoint}}))
    arguments = ("--port", "0", "--workers", "2", "--engine", "simulated")
    running = System(folder, arguments=(*arguments, "--config", str(settings))).start()
    yield running
    assert running.stop() == 0


@pytest.fixture
async def http(system: System) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=system.http, timeout=60.0) as client:
        yield client


@pytest.fixture
async def bus(system: System) -> AsyncIterator[Bus]:
    connected = await nats.connect(NatsConfig(url=system.endpoints["nats"]), "tracing")
    yield connected
    await connected.close()


def _body(max_tokens: int) -> dict[str, Any]:
    return {
        "model": "demo",
        "messages": [{"role": "user", "content": SECRET}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
    }


async def _stored(
    collector: Collector, trace_id: str, caller_id: str = ""
) -> dict[tuple[str, str], list[ReceivedSpan]]:
    """Return the spans of a trace by service and name, once the last has arrived: spans of the
    parts come in any order."""

    def is_whole() -> bool:
        spans = collector.of_trace(trace_id)
        known = {span.span_id for span in spans} | {caller_id, ""}
        is_told = "store record" in {span.name for span in spans}
        return is_told and all(span.parent_id in known for span in spans)

    try:
        # Longer than a batch of spans may take to send.
        await eventually(is_whole, timeout_s=30.0)
    except AssertionError as error:
        raise AssertionError(f"of the trace came\n{tree(collector.of_trace(trace_id))}") from error
    spans: dict[tuple[str, str], list[ReceivedSpan]] = {}
    for span in collector.of_trace(trace_id):
        spans.setdefault((span.service.removeprefix("millrace-"), span.name), []).append(span)
    return spans


async def test_a_request_is_one_trace_through_all_parts(
    http: httpx.AsyncClient, collector: Collector
) -> None:
    answer = await http.post(
        "/v1/chat/completions", json=_body(20), headers={"traceparent": CALLER}
    )
    assert answer.status_code == 200
    assert answer.headers["x-trace-id"] == "ab" * 16
    spans = await _stored(collector, "ab" * 16, "cd" * 8)
    assert {name: len(found) for name, found in spans.items()} == {
        ("gateway", "chat demo"): 1,
        ("gateway", "publish demo"): 1,
        ("scheduler", "queue demo"): 1,
        ("scheduler", "run demo"): 1,
        ("worker", "generate demo"): 1,
        ("worker", "prefill"): 1,
        ("worker", "decode"): 1,
        ("worker", "publish record"): 1,
        ("telemetry", "store record"): 1,
    }, tree(collector.of_trace("ab" * 16))
    above = {
        "chat demo": "cd" * 8,
        "publish demo": "chat demo",
        "queue demo": "publish demo",
        "run demo": "publish demo",
        "generate demo": "run demo",
        "prefill": "generate demo",
        "decode": "generate demo",
        "publish record": "generate demo",
        "store record": "publish record",
    }
    ids = {name: found[0].span_id for (_, name), found in spans.items()}
    parents = {name: found[0].parent_id for (_, name), found in spans.items()}
    assert parents == {name: ids.get(parent, parent) for name, parent in above.items()}
    life = spans["worker", "generate demo"][0]
    assert life.attributes["gen_ai.usage.output_tokens"] == 20
    assert not any(span.failed for found in spans.values() for span in found)
    # What is done for many requests is a trace of its own, with links both ways.
    record = spans["telemetry", "store record"][0]
    (batch,) = [span for span in collector.spans if record.links == [(span.trace_id, span.span_id)]]
    assert ("ab" * 16, ids["publish record"]) in batch.links


async def test_a_killed_worker_leaves_a_run_and_the_next_is_in_the_same_trace(
    system: System, http: httpx.AsyncClient, collector: Collector
) -> None:
    async with http.stream("POST", "/v1/chat/completions", json=_body(400)) as answer:
        trace_id = answer.headers["x-trace-id"]
        lines = answer.aiter_lines()
        for _ in range(4):
            await anext(lines)

        def prefills() -> list[ReceivedSpan]:
            return [span for span in collector.of_trace(trace_id) if span.name == "prefill"]

        await eventually(lambda: bool(prefills()), timeout_s=5.0)
        system.kill(prefills()[0].instance)
        text = "".join([line async for line in lines])
    assert text.endswith("[DONE]")
    spans = await _stored(collector, trace_id)
    lost, again = spans["scheduler", "run demo"]
    assert (lost.attributes.get("error.type"), lost.failed) == ("worker_lost", True)
    assert not again.failed
    assert again.links == [(trace_id, lost.span_id)]
    assert lost.attributes["millrace.worker.id"] != again.attributes["millrace.worker.id"]
    assert again.attributes["millrace.resumed_tokens"] > 0
    (former,) = spans["scheduler", "generate demo"]
    (latter,) = spans["worker", "generate demo"]
    assert (former.parent_id, latter.parent_id) == (lost.span_id, again.span_id)
    assert latter.links == [(trace_id, former.span_id)]
    assert former.attributes["millrace.worker.id"] == lost.attributes["millrace.worker.id"]
    first, second = spans["worker", "prefill"]
    assert (first.parent_id, second.parent_id) == (former.span_id, latter.span_id)
    assert spans["gateway", "chat demo"][0].attributes["millrace.runs"] == 2
    assert len(spans["worker", "decode"]) == 1
    above = parse_traceparent(f"00-{trace_id}-{lost.span_id}-01")
    assert above is not None
    request_id = former.attributes["millrace.request.id"]
    assert former.span_id == f"{attempt_span(above, request_id, 1).span_id:016x}"


async def test_a_published_job_goes_on_in_its_trace_or_begins_one(
    system: System, bus: Bus, collector: Collector
) -> None:
    sampling = SamplingParams(max_tokens=4)
    theirs = f"00-{'12' * 16}-{'34' * 8}-01"
    job = Job(request_id="traced-1", model="demo", prompt=SECRET, sampling=sampling)
    await bus.jobs.publish(job)
    await bus.jobs.publish(
        Job(
            request_id="traced-2",
            model="demo",
            prompt=SECRET,
            sampling=sampling,
            traceparent=theirs,
        )
    )
    client = await connect_nats(system.endpoints["nats"])
    body = {
        "request_id": "traced-3",
        "model": "demo",
        "prompt": SECRET,
        "sampling": {"max_tokens": 4},
    }
    headers = {"Content-Type": "application/json", "traceparent": f"00-{'56' * 16}-{'78' * 8}-01"}
    subject = subjects.job(TenantQueue("demo", Tier.FREE, None))
    await client.jetstream().publish(subject, json.dumps(body).encode(), headers=headers)
    await client.close()
    await eventually(lambda: bool(collector.of_request("traced-1")))
    ours = collector.of_request("traced-1")[0].trace_id
    spans = await _stored(collector, ours)
    (first,) = spans["scheduler", "job demo"]
    assert first.parent_id == ""
    assert spans["scheduler", "run demo"][0].parent_id == first.span_id

    for trace_id, span_id in (("12" * 16, "34" * 8), ("56" * 16, "78" * 8)):
        spans = await _stored(collector, trace_id, span_id)
        assert [run.parent_id for run in spans["scheduler", "run demo"]] == [span_id]


async def test_the_analyst_finds_the_trace_in_the_record(
    system: System, http: httpx.AsyncClient
) -> None:
    answer = await http.post("/v1/chat/completions", json=_body(4) | {"stream": False})
    request_id, trace_id = answer.headers["x-request-id"], answer.headers["x-trace-id"]
    query = f"SELECT trace_id FROM requests FINAL WHERE request_id = '{request_id}'"
    await eventually(lambda: system.sql(query) == [{"trace_id": trace_id}])


async def test_no_word_of_a_prompt_and_no_tenant_leaves_in_a_trace(
    http: httpx.AsyncClient, collector: Collector
) -> None:
    answer = await http.post("/v1/chat/completions", json=_body(4) | {"user": "u-1234"})
    await _stored(collector, answer.headers["x-trace-id"])
    for secret in (SECRET.encode(), b"nobody may read", b"u-1234", b"tenant", b"local"):
        assert not any(secret in body for body in collector.bodies)


async def test_a_collector_that_is_away_is_not_felt(
    system: System, http: httpx.AsyncClient, collector: Collector
) -> None:
    collector.status = 503
    try:
        for _ in range(5):
            answer = await http.post("/v1/chat/completions", json=_body(4))
            assert answer.status_code == 200

        def warnings() -> list[str]:
            log = (system.data / "logs" / "gateway-1.log").read_text()
            return [line for line in log.splitlines() if "trace collector" in line]

        await eventually(lambda: len(warnings()) == 1, timeout_s=20.0)
        collector.gate.clear()
        answer = await http.post("/v1/chat/completions", json=_body(4))
        assert answer.status_code == 200
        assert len(warnings()) == 1
    finally:
        collector.status = 200
        collector.gate.set()
    answer = await http.post("/v1/chat/completions", json=_body(4))
    await _stored(collector, answer.headers["x-trace-id"])
