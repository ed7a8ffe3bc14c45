"""Spans of a gateway, and the trace context that it accepts and passes on."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import httpx
import pytest
from websockets.asyncio.client import connect

from millrace.runtime.metrics_server import CONTENT_TYPE, OPENMETRICS_TYPE
from millrace.runtime.tracing import SpanKind, parse_traceparent
from millrace.schemas.websocket import SUBPROTOCOL
from tests.support.running_gateway import RunningGateway, running_gateway
from tests.support.scraped import exemplars
from tests.support.waiting import eventually
from tests.tracing.kept import KeptSpans, kept_tracing

CALLER = f"00-{'ab' * 16}-{'cd' * 8}-01"
SECRET = "the quick brown fox"


class Traced:
    """Gateway that traces, its spans, and a client."""

    def __init__(self, front: RunningGateway, http: httpx.AsyncClient, kept: KeptSpans) -> None:
        self.front = front
        self.http = http
        self.kept = kept

    async def chat(self, traceparent: str | None = None, **changes: object) -> httpx.Response:
        body = {"model": "echo", "messages": [{"role": "user", "content": SECRET}]} | changes
        headers = {} if traceparent is None else {"traceparent": traceparent}
        return await self.http.post("/v1/chat/completions", json=body, headers=headers)


@pytest.fixture(params=[1.0])
async def traced(request: pytest.FixtureRequest) -> AsyncIterator[Traced]:
    tracing, kept = kept_tracing(request.param)
    async with (
        running_gateway(tracing=tracing) as front,
        httpx.AsyncClient(base_url=front.url, timeout=10) as http,
    ):
        yield Traced(front, http, kept)


never = pytest.mark.parametrize("traced", [0.0], indirect=True)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_told_by_the_names_of_the_field(traced: Traced, stream: bool) -> None:
    answer = await traced.chat(CALLER, stream=stream, max_tokens=100, temperature=0.5)
    assert answer.status_code == 200
    assert answer.headers["x-trace-id"] == "ab" * 16
    given = parse_traceparent(answer.headers["traceparent"])
    span = traced.kept.one("chat echo")
    assert span.context == given
    assert f"{span.parent_span_id:016x}" == "cd" * 8
    assert span.kind is SpanKind.SERVER
    expected = {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "echo",
        "gen_ai.response.model": "echo",
        "gen_ai.request.max_tokens": 100,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.usage.input_tokens": len(SECRET),
        "gen_ai.usage.output_tokens": len(SECRET),
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.response.id": answer.headers["x-request-id"],
        "server.address": "127.0.0.1",
        "millrace.runs": 1,
    }
    assert {name: span.attributes.get(name) for name in expected} == expected
    (first,) = span.events
    assert first.name == "first token"
    assert span.start_ns < first.at_ns <= span.end_ns
    assert span.error == ""
    publish = traced.kept.one("publish echo")
    assert publish.parent_span_id == span.context.span_id
    (job,) = traced.front.worker.jobs
    assert job.traceparent == publish.context.traceparent
    assert SECRET not in repr(traced.kept.spans)
    assert job.tenant not in repr(traced.kept.spans)


async def test_latencies_on_metrics_name_their_trace(traced: Traced) -> None:
    """Only OpenMetrics has exemplars; Prometheus' text format has none."""
    await traced.chat(CALLER)
    asked = {"accept": "application/openmetrics-text", "accept-encoding": "gzip"}
    answer = await traced.http.get("/metrics", headers=asked)
    assert answer.headers["content-type"] == OPENMETRICS_TYPE
    assert answer.headers["content-encoding"] == "gzip"
    assert exemplars(answer.text) == {
        f"millrace_{name}_seconds_bucket": {"ab" * 16}
        for name in ("time_to_first_token", "time_per_output_token", "e2e_request_latency")
    }
    plain = await traced.http.get("/metrics", headers={"accept-encoding": "identity"})
    assert plain.headers["content-type"] == CONTENT_TYPE
    assert "ab" * 16 not in plain.text


async def test_each_choice_has_its_own_job_in_one_trace(traced: Traced) -> None:
    await traced.chat(n=3)
    jobs = traced.front.worker.jobs
    published = {span.context.traceparent for span in traced.kept.all("publish echo")}
    assert {job.traceparent for job in jobs} == published
    assert len(published) == 3
    assert traced.kept.one("chat echo").attributes["gen_ai.request.choice.count"] == 3


@pytest.mark.parametrize("bad", ["nonsense", f"00-{'0' * 32}-{'cd' * 8}-01", CALLER.upper()])
async def test_a_traceparent_that_is_none_begins_another_trace(traced: Traced, bad: str) -> None:
    answer = await traced.chat(bad)
    assert answer.status_code == 200
    assert answer.headers["x-trace-id"] != "ab" * 16
    assert traced.kept.one("chat echo").parent_span_id == 0


async def test_a_caller_that_does_not_record_is_not_recorded(traced: Traced) -> None:
    answer = await traced.chat(CALLER[:-1] + "0")
    assert answer.status_code == 200
    assert "x-trace-id" not in answer.headers
    assert traced.kept.spans == []
    assert traced.front.worker.jobs[0].traceparent == ""


@never
async def test_a_ratio_of_nothing_records_what_callers_record(traced: Traced) -> None:
    assert "x-trace-id" not in (await traced.chat()).headers
    assert traced.kept.spans == []
    assert (await traced.chat(CALLER)).headers["x-trace-id"] == "ab" * 16
    assert traced.kept.one("chat echo")


async def test_a_refusal_is_told_as_the_caller_s_own(traced: Traced) -> None:
    answer = await traced.chat(model="no such")
    assert answer.status_code == 404
    span = traced.kept.one("POST /v1/chat/completions")
    assert span.attributes["http.response.status_code"] == 404
    assert span.attributes["error.type"] == answer.json()["error"]["code"]
    assert span.error == ""
    assert answer.headers["x-trace-id"] == span.context.trace_name


async def test_a_completion_and_an_embedding_are_named_for_what_they_are(traced: Traced) -> None:
    await traced.http.post("/v1/completions", json={"model": "echo", "prompt": SECRET})
    assert traced.kept.one("text_completion echo")
    body = {"model": "echo", "input": [SECRET, "b"]}
    answer = await traced.http.post("/v1/embeddings", json=body, headers={"traceparent": CALLER})
    assert answer.status_code == 200
    assert answer.headers["x-trace-id"] == "ab" * 16
    span = traced.kept.one("embeddings echo")
    assert span.attributes["gen_ai.usage.input_tokens"] == len(SECRET) + 1
    jobs = traced.front.worker.jobs[1:]
    assert {job.traceparent for job in jobs} == {span.context.traceparent}


async def test_generations_of_a_socket_are_in_the_trace_of_its_handshake(traced: Traced) -> None:
    async with connect(
        traced.front.ws_url,
        subprotocols=[SUBPROTOCOL],  # type: ignore[list-item]
        additional_headers={"traceparent": CALLER},
    ) as socket:
        for number, model in enumerate(("echo", "echo", "none")):
            message = {"type": "generate", "id": str(number), "model": model, "prompt": SECRET}
            await socket.send(json.dumps(message))
        ends = 0
        while ends < 3:
            ends += json.loads(await socket.recv())["type"] in ("done", "error")
    spans = traced.kept.all("chat echo")
    assert len(spans) == 2
    assert {f"{span.parent_span_id:016x}" for span in spans} == {"cd" * 8}
    assert {span.attributes["gen_ai.usage.output_tokens"] for span in spans} == {len(SECRET)}
    assert all("http.response.status_code" not in span.attributes for span in spans)
    refused = traced.kept.one("GET /v1/ws")
    assert refused.attributes["error.type"] == "model_not_found"


async def test_a_client_that_leaves_is_seen(traced: Traced) -> None:
    traced.front.worker.gate.clear()
    body = {"model": "echo", "messages": [{"role": "user", "content": SECRET}], "stream": True}
    with pytest.raises(httpx.ReadTimeout):
        await traced.http.post("/v1/chat/completions", json=body, timeout=0.3)
    await eventually(lambda: "chat echo" in traced.kept.names)
    span = traced.kept.one("chat echo")
    assert span.attributes["error.type"] == "client_left"
    assert span.attributes["http.response.status_code"] == 499


async def test_without_tracing_a_caller_s_trace_goes_by() -> None:
    async with (
        running_gateway() as front,
        httpx.AsyncClient(base_url=front.url, timeout=10) as http,
    ):
        body = {"model": "echo", "messages": [{"role": "user", "content": SECRET}]}
        headers = {"traceparent": CALLER}
        answer = await http.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200
        assert "traceparent" not in answer.headers
        assert front.worker.jobs[0].traceparent == ""
