"""Equal requests with one key at the same time: each client has its own copy of the one answer."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from millrace.bus.control import Control
from millrace.gateway.request import tool_loop
from millrace.gateway.streams.stream import StreamPhase
from millrace.gateway.tools.catalogue import load_tools
from millrace.schemas.config import RedisConfig
from tests.gateway.resuming.clients import (
    CHAT,
    CONFIG,
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
from tests.gateway.resuming.test_tool_results import call_then_say
from tests.support.running_gateway import MODEL, RunningGateway, running_gateway
from tests.support.tool_server import Seen, Write, reply, tool_server
from tests.support.waiting import eventually

HEADERS = {"Idempotency-Key": "same"}


async def read(front: RunningGateway, reading: Events | None = None) -> Events:
    """Read one client's stream to its end."""
    events = reading or Events()
    async with (
        httpx.AsyncClient(base_url=front.url, timeout=30) as http,
        http.stream("POST", PATH, json=CHAT, headers=HEADERS) as response,
    ):
        assert response.status_code == 200
        async for line in response.aiter_lines():
            events.take(line)
    return events


async def ask(front: RunningGateway) -> httpx.Response:
    """Request one client's whole answer."""
    async with httpx.AsyncClient(base_url=front.url, timeout=30) as http:
        return await http.post(PATH, json=CHAT | {"stream": False}, headers=HEADERS)


def num_copies(pair: Pair) -> int:
    return sum(len(front.gateway.responses.copies) for front in (pair.first, pair.second))


async def test_twenty_at_two_gateways_get_the_one_answer(pair: Pair) -> None:
    pair.worker.gate.clear()
    fronts = [pair.first, pair.second] * 10
    asking = [asyncio.create_task(ask(front)) for front in fronts]
    await eventually(lambda: num_copies(pair) == 19, timeout_s=30)
    pair.worker.gate.set()
    answers = await asyncio.gather(*asking)
    assert [answer.status_code for answer in answers] == [200] * 20
    assert {answer.text for answer in answers} == {answers[0].text}
    assert answers[0].json()["choices"][0]["message"]["content"] == TEXT
    assert len(pair.worker.jobs) == 1
    await eventually(lambda: num_copies(pair) == 0)
    for front in (pair.first, pair.second):
        assert not list(front.gateway.streams)
        assert not front.gateway.responses.all()
    # One of them was delivered, the others are copies of it.
    assert len(_deliveries(pair)) == 1


def _deliveries(pair: Pair) -> list[object]:
    return [one for one in pair.first.broker.outbox.messages() if one.subject == "rec.delivery"]


async def test_each_stream_is_read_at_its_own_pace(pair: Pair) -> None:
    """Clients that come later get the stream from its beginning."""
    dripping = await slow(pair.worker)
    early = Events()
    reading = [asyncio.create_task(read(pair.first, early))]
    await eventually(lambda: len(early.text) > 5, timeout_s=30)
    reading += [asyncio.create_task(read(front)) for front in (pair.first, pair.second) * 2]
    await eventually(lambda: num_copies(pair) == 4 or all(one.done() for one in reading))
    dripping.cancel()
    pair.worker.gate.set()
    for events in await asyncio.gather(*reading):
        assert (events.text, events.done) == (TEXT, True)
    assert len(pair.worker.jobs) == 1
    assert not pair.worker.cancelled


@pytest.mark.parametrize("who", ["first", "copy"])
async def test_a_client_that_leaves_does_not_affect_the_others(pair: Pair, who: str) -> None:
    pair.worker.gate.clear()
    first = asyncio.create_task(read(pair.first))
    await eventually(lambda: len(pair.first.gateway.responses.all()) == 1)
    copies = [asyncio.create_task(read(front)) for front in (pair.first, pair.second)]
    await eventually(lambda: num_copies(pair) == 2)
    leaver = first if who == "first" else copies[0]
    leaver.cancel()
    streams = pair.first.gateway.streams
    if who == "first":
        await eventually(lambda: any(stream.phase is StreamPhase.DETACHED for stream in streams))
    else:
        await eventually(lambda: num_copies(pair) == 1)
    pair.worker.gate.set()
    stayed = [one for one in (first, *copies) if one is not leaver]
    for events in await asyncio.gather(*stayed):
        assert (events.text, events.done) == (TEXT, True)
    assert not pair.worker.cancelled


async def test_a_client_that_reads_too_slowly_is_dropped_alone(pair: Pair) -> None:
    pair.worker.gate.clear()
    readers = [asyncio.create_task(read(pair.first)) for _ in range(3)]
    await eventually(lambda: num_copies(pair) == 2)
    slow_one = next(stream for stream in pair.first.gateway.streams if stream.is_copy)
    slow_one.client.limit_bytes = -1
    pair.worker.gate.set()
    results = await asyncio.gather(*readers, return_exceptions=True)
    read_whole = [one for one in results if isinstance(one, Events) and one.done]
    assert [events.text for events in read_whole] == [TEXT, TEXT]
    assert slow_one.outcome == "slow_client"
    assert not pair.worker.cancelled


async def test_a_cancel_by_one_ends_it_for_all(pair: Pair) -> None:
    pair.worker.gate.clear()
    fields = {"model": MODEL, "prompt": TEXT, "idempotency_key": "same"}
    async with opened(pair.first) as one, opened(pair.second) as other:
        await send(one, "generate", id="a", **fields)
        await until(one, "accepted")
        await send(other, "generate", id="b", **fields)
        await until(other, "accepted")
        assert num_copies(pair) == 1
        await send(other, "cancel", id="b")
        assert (await until(other, "done"))[-1]["finish_reason"] == "cancelled"
        assert (await until(one, "error"))[-1]["code"] == "cancelled"
    assert len(pair.worker.jobs) == 1


async def test_clients_share_the_answer_after_its_gateway_died(pair: Pair) -> None:
    pair.worker.gate.clear()
    asking = asyncio.create_task(read(pair.first))
    await eventually(lambda: len(pair.first.gateway.responses.all()) == 1)
    await eventually(lambda: len(pair.worker.jobs) == 1)
    await pair.kill_first()
    copies = [asyncio.create_task(read(pair.second)) for _ in range(3)]
    await eventually(lambda: len(pair.second.gateway.responses.copies) == 2, timeout_s=30)
    pair.worker.gate.set()
    for events in await asyncio.gather(*copies):
        assert (events.text, events.done) == (TEXT, True)
    asking.cancel()
    assert len(pair.worker.jobs) == 1


@pytest.mark.parametrize("num_unanswered", [0, 2])
async def test_copies_read_the_rounds_of_tools_that_run_once(
    tmp_path: Path, redis: RedisConfig, num_unanswered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the gateway that runs the tool is not reached for a moment."""
    file = tmp_path / "tools.yaml"
    looks: list[bool] = []
    is_there = Control.is_gateway_there

    async def look(control: Control, *question: Any) -> bool:
        looks.append(await is_there(control, *question) and len(looks) >= num_unanswered)
        return looks[-1]

    async def answer(seen: Seen, write: Write) -> None:
        await eventually(lambda: len(looks) >= num_unanswered)
        await reply('{"sky": "rain"}')(seen, write)

    async with tool_server() as server, AsyncExitStack() as stack:
        server.answers["/weather"] = answer
        file.write_text(
            f"tools:\n  weather:\n    url: {server.url('/weather')}\n    allow_private: true\n"
            "    parameters: {type: object, properties: {city: {type: string}}}\n"
        )
        tools = load_tools(str(file), {})
        first = await stack.enter_async_context(
            running_gateway(CONFIG, gateway_id="gw-1", redis=redis, tools=tools)
        )
        second = await stack.enter_async_context(
            running_gateway(
                CONFIG, gateway_id="gw-2", redis=redis, tools=tools, broker=first.broker
            )
        )
        pair = Pair(first, second)
        await eventually(lambda: bool(second.gateway.fleet.live_workers()))
        pair.worker.script = call_then_say
        pair.worker.gate.clear()
        fields = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "Rain?"}],
            "server_tools": ["weather"],
            "idempotency_key": "same",
        }
        sockets = [await stack.enter_async_context(opened(f)) for f in (first, first, second)]
        for socket in sockets:
            await send(socket, "generate", id="a", **fields)
            await until(socket, "accepted")
        assert num_copies(pair) == 2
        monkeypatch.setattr(tool_loop, "_LOOK_S", 0.2)
        monkeypatch.setattr(Control, "is_gateway_there", look)
        pair.worker.gate.set()
        for socket in sockets:
            reading = Reading()
            messages = await until(socket, "done")
            reading.take(messages)
            assert reading.text == "It rains."
            assert [one["name"] for one in messages if one["type"] == "tool_step"] == ["weather"]
    assert len(server.seen) == 1
    assert len(pair.worker.jobs) == 2
