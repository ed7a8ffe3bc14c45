"""Idempotency keys: one answer for one key."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from millrace.bus.job_queue import PublishedJob
from millrace.gateway.request.response_stream import ResponseStream
from millrace.gateway.streams.stream import StreamPhase
from millrace.runtime.metrics_server import render
from millrace.schemas.errors import BusUnavailableError
from millrace.schemas.jobs import Job
from tests.gateway.resuming.clients import (
    CHAT,
    PATH,
    TEXT,
    Events,
    Pair,
    Reading,
    opened,
    send,
    slow,
    until,
)
from tests.gateway.resuming.test_deliveries import records
from tests.support.running_gateway import MODEL
from tests.support.waiting import eventually


async def test_one_answer_for_one_key(pair: Pair) -> None:
    body = CHAT | {"stream": False}
    headers = {"Idempotency-Key": "k-1"}
    async with (
        httpx.AsyncClient(base_url=pair.first.url, timeout=10) as http,
        httpx.AsyncClient(base_url=pair.second.url, timeout=10) as other,
    ):
        first = await http.post(PATH, json=body, headers=headers)
        again = await http.post(PATH, json=body, headers=headers)
        elsewhere = await other.post(PATH, json=body, headers=headers)
        pair.worker.forget(first.json()["id"])
        stored = await other.post(PATH, json=body, headers=headers)
        assert first.status_code == 200
        assert first.json()["choices"][0]["message"]["content"] == TEXT
        for answer in (again, elsewhere, stored):
            assert answer.json() == first.json()
        assert len(pair.worker.jobs) == 1
        conflict = await http.post(PATH, json=body | {"seed": 1}, headers=headers)
        assert (conflict.status_code, conflict.json()["error"]["code"]) == (
            409,
            "idempotency_conflict",
        )
        bad = await http.post(PATH, json=body, headers={"Idempotency-Key": "k" * 256})
        assert bad.json()["error"]["param"] == "idempotency-key"


def counted(pair: Pair, name: str) -> float:
    """Return the sum of a metric over both gateways and all labels."""
    total = 0.0
    for front in (pair.first, pair.second):
        for line in render(front.gateway.metrics.registry).decode().splitlines():
            if line.startswith((f"{name}{{", f"{name} ")):
                total += float(line.rpartition(" ")[2])
    return total


async def test_an_answer_given_again_is_no_generation(pair: Pair) -> None:
    headers = {"Idempotency-Key": "k-again"}
    async with (
        httpx.AsyncClient(base_url=pair.first.url, timeout=10) as http,
        httpx.AsyncClient(base_url=pair.second.url, timeout=10) as other,
    ):
        # The second one reads the answer while it is made.
        both = await asyncio.gather(
            *(http.post(PATH, json=CHAT, headers=headers) for _ in range(2))
        )
        assert [answer.status_code for answer in both] == [200, 200]
        before = {name: counted(pair, name) for name in _OF_GENERATIONS}
        assert before["millrace_generations_total"] == 1
        assert before["millrace_generation_tokens_total"] == len(TEXT)
        for client in (http, other, http, other):
            assert (await client.post(PATH, json=CHAT, headers=headers)).status_code == 200
    async with opened(pair.second) as socket:  # and again to a client that has all of it
        await send(socket, "resume", id="a", request_id=both[0].headers["x-request-id"])
        await until(socket, "done")
    [record] = await records(pair)
    assert (record.outcome, record.tokens_delivered) == ("done", len(TEXT))
    assert {name: counted(pair, name) for name in _OF_GENERATIONS} == before
    assert counted(pair, "millrace_repeated_answers_total") == 5


_OF_GENERATIONS = (
    *("millrace_generations_total", "millrace_generation_tokens_total"),
    *("millrace_prompt_tokens_total", "millrace_e2e_request_latency_seconds_count"),
    *("millrace_time_to_first_token_seconds_count", "millrace_inter_token_latency_seconds_count"),
    *("millrace_time_per_output_token_seconds_count", "millrace_resumes_total"),
    *("millrace_replays_total", "millrace_moved_generations_total", "millrace_stalls_total"),
)


async def test_token_ids_are_told_again(pair: Pair) -> None:
    body = CHAT | {"stream": False, "return_token_ids": True}
    headers = {"Idempotency-Key": "k-ids"}
    async with (
        httpx.AsyncClient(base_url=pair.first.url, timeout=10) as http,
        httpx.AsyncClient(base_url=pair.second.url, timeout=10) as other,
    ):
        first = await http.post(PATH, json=body, headers=headers)
        pair.worker.forget(first.json()["id"])
        stored = await other.post(PATH, json=body, headers=headers)
    assert len(first.json()["prompt_token_ids"]) == first.json()["usage"]["prompt_tokens"]
    assert stored.json() == first.json()


async def test_a_key_outlives_its_connection(pair: Pair) -> None:
    dripping = await slow(pair.worker)
    headers = {"Idempotency-Key": "k-3"}
    async with httpx.AsyncClient(base_url=pair.first.url, timeout=10) as http:
        async with http.stream("POST", PATH, json=CHAT, headers=headers) as response:
            async for _line in response.aiter_lines():
                break
            dripping.cancel()
            pair.worker.gate.clear()
        await eventually(
            lambda: all(s.phase is StreamPhase.DETACHED for s in pair.first.gateway.streams)
        )
        assert len(pair.first.gateway.streams) == 1
        assert not pair.worker.cancelled
        pair.worker.gate.set()
        events = Events()
        async with http.stream("POST", PATH, json=CHAT, headers=headers) as response:
            async for line in response.aiter_lines():
                events.take(line)
    assert (events.text, events.done) == (TEXT, True)
    assert len(pair.worker.jobs) == 1


async def test_a_generation_is_sent_again_with_its_key(pair: Pair) -> None:
    """A client that never read ``accepted`` sends its generation again."""
    fields = {"model": MODEL, "prompt": TEXT, "idempotency_key": "k-4"}
    pair.worker.gate.clear()
    async with opened(pair.first) as socket:
        await send(socket, "generate", id="a", **fields)
        first = (await until(socket, "accepted"))[-1]
        socket.transport.abort()
    reading = Reading()
    async with opened(pair.second) as socket:
        await send(socket, "generate", id="other", **fields)
        reading.take(await until(socket, "accepted"))
        pair.worker.gate.set()
        reading.take(await until(socket, "done"))
    assert (reading.request_id, reading.text) == (first["request_id"], TEXT)
    assert len(pair.worker.jobs) == 1


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_a_request_waiting_for_a_refused_one_is_submitted(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    """A client that waits for a refused request is not left without an answer."""
    jobs, release = pair.first.gateway.bus.jobs, asyncio.Event()
    publish = jobs.publish
    num_published = 0

    async def fail_once(job: Job, *, reserved: bool = False) -> PublishedJob:
        nonlocal num_published
        num_published += 1
        if num_published > 1:
            return await publish(job, reserved=reserved)
        await release.wait()
        raise BusUnavailableError("The message bus is unreachable.")

    later = pair.second if elsewhere else pair.first
    share = later.gateway.resuming.share
    num_looked = 0

    async def look(*args: Any, **kwargs: Any) -> ResponseStream:
        nonlocal num_looked
        num_looked += 1
        return await share(*args, **kwargs)

    monkeypatch.setattr(jobs, "publish", fail_once)
    monkeypatch.setattr(later.gateway.resuming, "share", look)
    body, headers = CHAT | {"stream": False}, {"Idempotency-Key": "k-5"}
    async with (
        httpx.AsyncClient(base_url=pair.first.url, timeout=10) as http,
        httpx.AsyncClient(base_url=later.url, timeout=10) as other,
    ):
        refused = asyncio.create_task(http.post(PATH, json=body, headers=headers))
        await eventually(lambda: num_published == 1)
        asking = asyncio.create_task(other.post(PATH, json=body, headers=headers))
        await eventually(lambda: num_looked > 0)
        release.set()
        assert (await refused).json()["error"]["code"] == "bus_unavailable"
        answer = await asking
    assert answer.json()["choices"][0]["message"]["content"] == TEXT
    assert len(pair.worker.jobs) == 1
