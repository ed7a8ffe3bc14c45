"""The HTTP surface below OpenAI's client: transcripts, bodies, disconnects, records, health."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from millrace.bus import codec
from millrace.gateway.__main__ import models_of
from millrace.gateway.rendering.chat import ChatRenderer
from millrace.registry.catalogue import load_catalogue
from millrace.schemas.config import Config, GatewayConfig
from millrace.schemas.control import TelemetryAnswer, TelemetryQuery
from millrace.schemas.records import DeliveryRecord
from tests.support.engine.checkpoints_made import write_catalogue
from tests.support.running_gateway import MODEL, RunningGateway, running_gateway
from tests.support.waiting import eventually

_GOLDEN = Path(__file__).parents[1] / "golden"
_CHAT = {"model": MODEL, "messages": [{"role": "user", "content": 'Say "hé"\n'}]}


def settled(transcript: str) -> str:
    """A transcript without what differs from run to run."""
    transcript = re.sub(r"(chatcmpl|cmpl)-[0-9a-f]{24}", r"\1-ID", transcript)
    return re.sub(r'"created":\d+', '"created":0', transcript)


@pytest.mark.parametrize(
    ("name", "path", "body"),
    [
        ("chat.sse", "/v1/chat/completions", _CHAT | {"stream": True}),
        (
            "chat_usage.sse",
            "/v1/chat/completions",
            _CHAT | {"stream": True, "stream_options": {"include_usage": True}},
        ),
        ("completion.sse", "/v1/completions", {"model": MODEL, "prompt": "hé", "stream": True}),
        ("chat.json", "/v1/chat/completions", _CHAT),
        ("completion.json", "/v1/completions", {"model": MODEL, "prompt": "hé"}),
        ("unknown_model.json", "/v1/completions", {"model": "absent", "prompt": "x"}),
    ],
)
async def test_golden_transcripts(
    front: RunningGateway, http: httpx.AsyncClient, name: str, path: str, body: dict[str, object]
) -> None:
    # One token per event at any speed: a token is sent after the previous one has arrived.
    front.worker.gate.clear()
    headers = {"accept": "text/event-stream" if name.endswith(".sse") else "*/*"}
    asking = asyncio.create_task(http.post(path, json=body, headers=headers))

    async def feed() -> None:
        while not asking.done():
            front.worker.gate.set()
            await asyncio.sleep(0)
            front.worker.gate.clear()
            await asyncio.sleep(0.005)

    await feed()
    answer = await asking
    assert settled(answer.text) == (_GOLDEN / name).read_text()
    assert answer.headers["x-request-id"].startswith(("chatcmpl-", "cmpl-"))


@pytest.mark.parametrize(
    ("body", "code"),
    [(b"{", "invalid_json"), (b"", "invalid_json"), (b"[]", "invalid_parameter")],
)
async def test_a_body_that_is_not_a_request(
    http: httpx.AsyncClient, body: bytes, code: str
) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/tokenize"):
        answer = await http.post(path, content=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", '{"model":"echo","messages":[{"role":"user","content":"x"}]}'),
        ("/v1/responses", '{"model":"echo","input":"x"}'),
        (
            "/v1/messages",
            '{"model":"echo","max_tokens":9,"messages":[{"role":"user","content":"x"}]}',
        ),
        ("/v1/tokenize", '{"model":"echo","prompt":"x"}'),
    ],
)
async def test_a_byte_order_mark_is_no_part_of_a_body(
    http: httpx.AsyncClient, path: str, body: str
) -> None:
    answer = await http.post(path, content=body.encode("utf-8-sig"))
    assert answer.status_code == 200, answer.text


async def test_paths_and_methods_that_are_not_served(http: httpx.AsyncClient) -> None:
    absent = await http.get("/v1/absent")
    assert (absent.status_code, absent.json()["error"]["code"]) == (404, "not_found")
    for path in ("/v1/chat/completions", "/v1/tokenize"):
        wrong = await http.get(path)
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert (await http.post("/v1/models")).status_code == 405
    # What is below these is served, they themselves are not.
    for path in ("/v1/sessions", "/v1/sessions/", "/v1/chat", "/v1/chat/"):
        absent = await http.get(path)
        assert (absent.status_code, absent.json()["error"]["code"]) == (404, "not_found"), path


async def test_a_body_over_the_limit_is_refused_with_both_sizes() -> None:
    async with (
        running_gateway(GatewayConfig(max_body_bytes=100_000)) as front,
        httpx.AsyncClient(base_url=front.url) as http,
    ):
        body = json.dumps({"model": MODEL, "prompt": "x" * 300_000}).encode()
        for path in ("/v1/completions", "/v1/tokenize"):
            answer = await http.post(path, content=body)
            assert answer.status_code == 413
            assert str(len(body)) in answer.json()["error"]["message"]
            assert "100000" in answer.json()["error"]["message"]
        assert (await http.get("/healthz")).status_code == 200


async def test_a_chunked_body_is_refused_before_it_is_whole() -> None:
    async with (
        running_gateway(GatewayConfig(max_body_bytes=50_000)) as front,
        httpx.AsyncClient(base_url=front.url) as http,
    ):

        async def endless() -> AsyncIterator[bytes]:
            for _ in range(100):
                yield b"x" * 10_000

        answer = await http.post("/v1/chat/completions", content=endless())
        assert answer.status_code == 413
        assert "50000" in answer.json()["error"]["message"]


async def test_a_head_without_end_is_refused(front: RunningGateway) -> None:
    url = httpx.URL(front.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 60_000)
    await writer.drain()
    writer.write(b"a" * 20_000)
    answer = await asyncio.wait_for(reader.read(), 5.0)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b"65536 bytes" in answer
    writer.close()


async def test_a_job_over_the_bus_limit_is_a_413() -> None:
    async with (
        running_gateway() as front,
        httpx.AsyncClient(base_url=front.url) as http,
    ):
        front.broker.max_payload_bytes = 500
        answer = await http.post("/v1/completions", json={"model": MODEL, "prompt": "x" * 1_000})
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "payload_too_large")
        assert len(front.gateway.streams) == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_disconnect_cancels(front: RunningGateway, stream: bool) -> None:
    front.worker.stop_before = 2
    async with httpx.AsyncClient(base_url=front.url) as http:
        asking = asyncio.create_task(
            http.post("/v1/chat/completions", json=_CHAT | {"stream": stream})
        )
        await eventually(lambda: any(s.reader.next_index == 2 for s in front.gateway.streams))
        asking.cancel()
    await eventually(lambda: len(front.worker.cancelled) == 1)
    await eventually(lambda: len(front.gateway.streams) == 0)
    record = await delivery(front)
    assert (record.outcome, record.request_id) == ("disconnected", front.worker.cancelled[0])


async def delivery(front: RunningGateway) -> DeliveryRecord:
    """The next delivery record in the outbox."""
    messages = await front.worker.bus.outbox.pull(1, 5)
    record = codec.RECORD.decode(messages[0].payload, codec.MSGPACK)
    assert isinstance(record, DeliveryRecord)
    return record


async def test_a_delivery_leaves_one_record(front: RunningGateway, http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/completions", json={"model": MODEL, "prompt": "hello"})
    record = await delivery(front)
    assert record.request_id == answer.json()["id"]
    assert (record.gateway_id, record.tenant, record.outcome) == ("gw-test", "local", "done")
    assert (record.tokens_delivered, record.num_replays, record.num_epochs) == (5, 0, 1)
    assert 0 < record.first_byte_ms <= record.total_ms
    assert 0 < record.intake_ms < 1_000


async def test_a_slow_body_is_intake_and_not_ttft(front: RunningGateway) -> None:
    """The time that a client takes to send its request counts as intake only."""
    body = json.dumps({"model": MODEL, "prompt": "hello"}).encode()
    arrived = asyncio.Event()

    async def halves() -> AsyncIterator[bytes]:
        yield body[:10]
        await arrived.wait()
        yield body[10:]

    async with httpx.AsyncClient(base_url=front.url, timeout=20) as http:
        headers = {"content-length": str(len(body))}
        asking = asyncio.create_task(
            http.post("/v1/completions", content=halves(), headers=headers)
        )
        began_s = asyncio.get_running_loop().time()
        await asyncio.wait([asking], timeout=0.3)
        arrived.set()
        assert (await asking).status_code == 200
        took_ms = (asyncio.get_running_loop().time() - began_s) * 1e3
    record = await delivery(front)
    assert 200 < record.intake_ms < took_ms
    assert record.intake_ms + record.first_byte_ms < took_ms


async def test_a_client_that_does_not_read_is_cut_off() -> None:
    async with running_gateway(GatewayConfig(client_buffer_bytes=50_000)) as front:
        front.worker.script = lambda _job: ["x" * 20_000] * 400
        body = json.dumps({"model": MODEL, "prompt": "x", "stream": True, "max_tokens": 400})
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", front.server.port)) as client:
            client.sendall((head + body).encode())
            await eventually(lambda: len(front.worker.cancelled) == 1)
            await eventually(lambda: len(front.gateway.streams) == 0)
            record = await delivery(front)
            assert record.outcome == "slow_client"
            assert record.tokens_delivered < 400


async def test_a_tier_that_may_not_use_the_model_is_refused(tmp_path: Path) -> None:
    models = models_of(load_catalogue(str(write_catalogue(tmp_path, MODEL, "pro"))), Config())
    async with (
        running_gateway(models=models) as front,
        httpx.AsyncClient(base_url=front.url, timeout=20) as http,
    ):
        front.worker.script = lambda _job: "fine"
        body = {"model": MODEL, "prompt": "mill", "max_tokens": 4}
        refused = await http.post("/v1/completions", json=body)
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, "service_tier")
        assert "tiers pro, not for enterprise" in error["message"]
        assert not front.worker.jobs
        taken = await http.post("/v1/completions", json=body | {"service_tier": "pro"})
        assert taken.status_code == 200


async def test_tokenize(http: httpx.AsyncClient) -> None:
    text = await http.post("/v1/tokenize", json={"model": MODEL, "prompt": "hé"})
    assert text.json() == {"tokens": [104, 195, 169], "count": 3, "max_model_len": 4096}
    messages = [{"role": "user", "content": "hi"}]
    chat = await http.post("/v1/tokenize", json={"model": MODEL, "messages": messages})
    assert chat.json()["tokens"] == [104, 105]
    both = await http.post(
        "/v1/tokenize", json={"model": MODEL, "prompt": "x", "messages": messages}
    )
    assert both.json()["error"]["param"] == "prompt"


async def test_health_follows_bus_and_workers(
    front: RunningGateway, http: httpx.AsyncClient
) -> None:
    healthy = await http.get("/healthz")
    assert (healthy.status_code, healthy.json()["status"]) == (200, "ok")
    await front.worker.announce(retired=True)
    front.broker.stop()
    away = await http.get("/healthz")
    assert (away.status_code, away.json()["status"]) == (503, "bus_unavailable")


async def test_metrics_count_without_naming_anybody(http: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "prompt": "hello", "user": "somebody"}
    await http.post("/v1/completions", json=body)
    await http.get("/absent/path")
    text = (await http.get("/metrics")).text
    assert 'millrace_http_requests_total{route="/v1/completions",status="200"} 1.0' in text
    assert 'millrace_http_requests_total{route="unmatched",status="404"} 1.0' in text
    assert f'millrace_generation_tokens_total{{model="{MODEL}"}} 5.0' in text
    assert f'millrace_time_to_first_token_seconds_count{{model="{MODEL}"}} 1.0' in text
    assert "millrace_inter_token_latency_seconds_count 4.0" in text
    assert "millrace_open_streams 0.0" in text
    assert "somebody" not in text
    assert "absent" not in text


async def test_operations_queries_go_to_telemetry(
    front: RunningGateway, http: httpx.AsyncClient
) -> None:
    assert (await http.get("/ops/api/rates")).status_code == 503
    asked: list[TelemetryQuery] = []

    async def answer(query: TelemetryQuery) -> TelemetryAnswer:
        asked.append(query)
        if query.name != "rates":
            return TelemetryAnswer(error=f"unknown query {query.name!r}", code="not_found")
        return TelemetryAnswer(rows_json=b'[{"rate":1.5}]')

    await front.worker.bus.control.serve_telemetry(answer)
    rows = await http.get("/ops/api/rates", params={"from_s": -900, "model": "007"})
    assert rows.json() == [{"rate": 1.5}]
    assert asked[0].params == {"from_s": "-900", "model": "007"}
    assert (await http.get("/ops/api/absent")).status_code == 404


async def test_pages_carry_a_strict_policy(http: httpx.AsyncClient) -> None:
    for path in ("/", "/static/chat/chat.js", "/static/chat/page.css", "/static/theme.css"):
        page = await http.get(path)
        assert page.status_code == 200
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert "http" not in page.text.replace("http://www.w3.org/2000/svg", "")
    assert (await http.get("/static/../app.py")).status_code == 404


async def test_a_bug_in_the_body_of_an_answer_is_an_error_like_any_other(
    front: RunningGateway, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def whole(_self: ChatRenderer) -> bytes:
        raise RuntimeError

    monkeypatch.setattr(ChatRenderer, "whole", whole)
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
    answer = await http.post("/v1/chat/completions", json=chat)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    await eventually(lambda: len(front.gateway.streams) == 0 and not front.gateway.responses.all())
