"""Resumed answers besides plain text, and cleanup after attempts that fail on the way."""

from __future__ import annotations

import asyncio
import codecs
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from millrace.gateway.request import submitter as submitting
from millrace.gateway.request.index import RequestIndex, digest_of
from millrace.schemas.config import GatewayConfig, RedisConfig
from millrace.schemas.errors import BusUnavailableError
from tests.gateway.resuming.clients import TAKES_EVENTS
from tests.support.running_gateway import MODEL, RunningGateway, running_gateway
from tests.support.servers import RedisServer
from tests.support.waiting import eventually

_CONFIG = GatewayConfig(replay_probe_s=0.2)
_COMPLETION: dict[str, Any] = {
    "model": MODEL,
    "prompt": "mill race",
    "echo": True,
    "logprobs": 1,
    "stream": True,
    "n": 2,
}


@pytest.fixture
async def redis(redis_server: RedisServer) -> RedisConfig:
    client = Redis.from_url(redis_server.url)
    await client.flushall()
    await client.aclose()
    return RedisConfig(url=f"{redis_server.url}/0")


@pytest.fixture
async def fronts(redis: RedisConfig) -> AsyncIterator[tuple[RunningGateway, RunningGateway]]:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(
            running_gateway(_CONFIG, gateway_id="gw-1", redis=redis)
        )
        second = await stack.enter_async_context(
            running_gateway(_CONFIG, gateway_id="gw-2", redis=redis, broker=first.broker)
        )
        await eventually(lambda: bool(second.gateway.fleet.live_workers()))
        yield first, second


def events_of(body: str) -> list[tuple[str, Any]]:
    """Return each event with the last id that a client knows after it."""
    found: list[tuple[str, Any]] = []
    last_id = ""
    for event in body.strip().split("\n\n"):
        data = ""
        for line in event.split("\n"):
            if line.startswith("id: "):
                last_id = line.removeprefix("id: ")
            elif line.startswith("data: "):
                data = line.removeprefix("data: ")
        if data and data != "[DONE]":
            found.append((last_id, json.loads(data)))
    return found


def pieces_of(events: list[tuple[str, Any]]) -> list[list[tuple[str, list[int]]]]:
    """Return, for each choice, its texts and the offsets of their tokens."""
    pieces: list[list[tuple[str, list[int]]]] = [[], []]
    for _, event in events:
        for choice in event["choices"]:
            offsets = (choice["logprobs"] or {}).get("text_offset", [])
            if choice["text"]:
                pieces[choice["index"]].append((choice["text"], offsets))
    return pieces


@pytest.mark.parametrize("cut", [0, 3, 7])
async def test_an_echo_comes_once_and_offsets_go_on(
    fronts: tuple[RunningGateway, RunningGateway], cut: int
) -> None:
    first, second = fronts
    async with (
        httpx.AsyncClient(base_url=first.url, timeout=10) as one,
        httpx.AsyncClient(base_url=second.url, timeout=10) as other,
    ):
        answer = await one.post("/v1/completions", json=_COMPLETION, headers=TAKES_EVENTS)
        whole = events_of(answer.text)
        request_id = whole[-1][0].partition("/")[0]
        headers = {"Last-Event-ID": f"{request_id}/{cut},{cut}"}
        rest = events_of(
            (await other.post("/v1/completions", json=_COMPLETION, headers=headers)).text
        )
    for all_pieces, pieces in zip(pieces_of(whole), pieces_of(rest), strict=True):
        text = "".join(text for text, _ in all_pieces)
        num_had = len("mill race") + cut if cut else 0
        assert "".join(text for text, _ in pieces) == text[num_had:]
        offsets = [offset for _, some in all_pieces for offset in some]
        assert [offset for _, some in pieces for offset in some] == offsets[num_had:]


@pytest.mark.parametrize("cut", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("echo", [False, True])
async def test_offsets_go_on_within_a_character(
    fronts: tuple[RunningGateway, RunningGateway], cut: int, *, echo: bool
) -> None:
    first, second = fronts
    text = "a\U0001f600b\u4f60"
    decoder = codecs.getincrementaldecoder("utf-8")()
    texts = [decoder.decode(bytes([one])) for one in text.encode()]
    first.worker.answer_ids, first.worker.script = text.encode(), lambda _job: texts
    body = {"model": MODEL, "prompt": "\u00e9", "echo": echo, "logprobs": 1, "stream": True}
    async with (
        httpx.AsyncClient(base_url=first.url, timeout=10) as one,
        httpx.AsyncClient(base_url=second.url, timeout=10) as other,
    ):
        whole = events_of((await one.post("/v1/completions", json=body, headers=TAKES_EVENTS)).text)
        request_id = whole[-1][0].partition("/")[0]
        headers = {"Last-Event-ID": f"{request_id}/{cut}"}
        rest = events_of((await other.post("/v1/completions", json=body, headers=headers)).text)
    found = [
        offset
        for _, event in rest
        for choice in event["choices"]
        for offset in (choice["logprobs"] or {}).get("text_offset", ())
    ]
    start = 1 if echo else 0
    expected = [start + at for at, character in enumerate(text) for _ in character.encode()]
    assert found == expected[cut:]


async def test_a_resumption_that_fails_leaves_an_answer_that_ends(
    fronts: tuple[RunningGateway, RunningGateway], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = fronts
    first.worker.gate.clear()
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "stream": True}

    async def away(*_: object) -> None:
        raise BusUnavailableError("The message bus is unreachable.")

    async with (
        httpx.AsyncClient(base_url=first.url, timeout=10) as one,
        httpx.AsyncClient(base_url=second.url, timeout=10) as other,
        one.stream("POST", "/v1/chat/completions", json=chat) as response,
    ):
        headers = {"Last-Event-ID": f"{response.headers['x-request-id']}/0"}
        control = second.gateway.bus.control
        monkeypatch.setattr(control, "serve_resume_points", away)
        refused = await other.post("/v1/chat/completions", json=chat, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "bus_unavailable")
        first.worker.gate.set()
        await eventually(
            lambda: len(second.gateway.streams) == 0 and not second.gateway.responses.all()
        )
    assert not first.worker.cancelled


async def test_two_clients_take_over_the_key_of_a_dead_gateway(
    fronts: tuple[RunningGateway, RunningGateway],
) -> None:
    """The dead gateway had claimed the key and published nothing."""
    first, _ = fronts
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}).encode()
    link = first.gateway.redis
    index = RequestIndex(link, 60.0)
    digest = digest_of(b"/v1/chat/completions", body)
    await index.claim("local", "k-1", digest, "chatcmpl-gone")
    headers = {"Idempotency-Key": "k-1", "Content-Type": "application/json"}
    async with httpx.AsyncClient(base_url=first.url, timeout=8) as http:
        answers = await asyncio.gather(
            *(http.post("/v1/chat/completions", content=body, headers=headers) for _ in range(2))
        )
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].json() == answers[1].json()
    assert len(first.worker.jobs) == 1
    assert len(first.gateway.streams) == 0


async def test_a_client_that_waited_too_long_shares_what_another_submitted(
    fronts: tuple[RunningGateway, RunningGateway], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other client's request was submitted and answered after the wait had timed out."""
    monkeypatch.setattr(submitting, "_SUBMITTED_WITHIN_S", 0.1)
    first, _ = fronts
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}).encode()
    submitter = first.gateway.submitter
    index = submitter._context.index
    claim, submit = index.claim, submitter.submit_new
    await claim("local", "k-1", digest_of(b"/v1/chat/completions", body), "chatcmpl-gone")
    waiting, answered = asyncio.Event(), asyncio.Event()
    claims: list[str] = []
    submitted: list[str] = []

    async def claim_late(tenant: str, key: str, digest: str, new_id: str) -> str:
        claims.append(new_id)
        if new_id == claims[0] and len(claims) == 2:
            waiting.set()
            await answered.wait()
        return await claim(tenant, key, digest, new_id)

    async def submit_noted(request: Any, requester: Any, request_id: str, key: str = "") -> Any:
        submitted.append(request_id)
        return await submit(request, requester, request_id, key)

    monkeypatch.setattr(index, "claim", claim_late)
    monkeypatch.setattr(submitter, "submit_new", submit_noted)
    headers = {"Idempotency-Key": "k-1", "Content-Type": "application/json"}
    path = "/v1/chat/completions"
    async with httpx.AsyncClient(base_url=first.url, timeout=8) as http:
        late = asyncio.create_task(http.post(path, content=body, headers=headers))
        await waiting.wait()
        other = await http.post(path, content=body, headers=headers)
        answered.set()
        assert (await late).json() == other.json()
    assert submitted == ["chatcmpl-gone"]


async def test_a_released_key_belongs_to_the_next_request(
    fronts: tuple[RunningGateway, RunningGateway], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that waited for the refused request gets the next request's answer."""
    monkeypatch.setattr(submitting, "_SUBMITTED_WITHIN_S", 0.4)
    first, second = fronts
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}).encode()
    index = RequestIndex(first.gateway.redis, 60.0)
    digest = digest_of(b"/v1/chat/completions", body)
    await index.claim("local", "k-1", digest, "chatcmpl-refused")
    headers = {"Idempotency-Key": "k-1", "Content-Type": "application/json"}
    path = "/v1/chat/completions"
    async with (
        httpx.AsyncClient(base_url=first.url, timeout=8) as http,
        httpx.AsyncClient(base_url=second.url, timeout=8) as other,
    ):
        looked_up = asyncio.Event()
        share = first.gateway.resuming.share

        async def share_noticed(*args: Any, **kwargs: Any) -> Any:
            looked_up.set()
            return await share(*args, **kwargs)

        monkeypatch.setattr(first.gateway.resuming, "share", share_noticed)
        waiting = asyncio.create_task(http.post(path, content=body, headers=headers))
        await looked_up.wait()
        await index.release("local", "k-1", "chatcmpl-refused")
        answer = await other.post(path, content=body, headers=headers)
        late = await waiting
    assert late.json() == answer.json()
    assert len(first.worker.jobs) == 1


async def test_a_stopping_gateway_refuses_requests_that_have_not_begun(
    fronts: tuple[RunningGateway, RunningGateway],
) -> None:
    """The refusal comes at once, without a wait for frames that no worker sends."""
    first, _ = fronts
    first.worker.stop_before = 0
    first.worker.lose = lambda _frame: True
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "stream": True}
    async with httpx.AsyncClient(base_url=first.url, timeout=8) as http:
        asking = asyncio.create_task(http.post("/v1/chat/completions", json=chat))
        await eventually(lambda: len(first.gateway.streams) == 1)
        await first.gateway.drain(0.0)
        answer = await asyncio.wait_for(asking, 1.5)
    assert "gateway_restarting" in answer.text
