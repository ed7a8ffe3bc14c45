"""Answers that go on over another connection, here, at another gateway, after a gateway's death."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from bus.memory import MemoryBroker, MemoryBus
from gateway.tool_catalogue import load_tools
from schemas.config import GatewayConfig, RedisConfig
from schemas.jobs import Job
from schemas.websocket import SUBPROTOCOL
from tests.support.running_gateway import MODEL, RunningGateway, running_gateway
from tests.support.servers import RedisServer
from tests.support.tool_server import reply, tool_server
from tests.support.waiting import eventually

_TEXT = "the mill turns as long as the water runs"
_CONFIG = GatewayConfig(replay_probe_s=0.2, resume_grace_s=5.0)


class Pair:
    """Two gateways of one system; the worker belongs to the first's side of the bus."""

    def __init__(self, first: RunningGateway, second: RunningGateway) -> None:
        self.first = first
        self.second = second
        self.worker = first.worker

    async def kill_first(self) -> None:
        """It says nothing any more, to nobody, and hears nothing."""
        bus = self.first.gateway.bus
        assert isinstance(bus, MemoryBus)
        bus.control = MemoryBus(MemoryBroker()).control
        await bus.close()


@pytest.fixture
async def redis(redis_server: RedisServer) -> RedisConfig:
    client = Redis.from_url(redis_server.url)
    await client.flushall()
    await client.aclose()
    return RedisConfig(url=f"{redis_server.url}/0")


@pytest.fixture
async def pair(redis: RedisConfig) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(
            running_gateway(_CONFIG, gateway_id="gw-1", redis=redis)
        )
        second = await stack.enter_async_context(
            running_gateway(_CONFIG, gateway_id="gw-2", redis=redis, broker=first.broker)
        )
        await eventually(lambda: bool(second.gateway.fleet.live_workers()))
        yield Pair(first, second)


@asynccontextmanager
async def opened(front: RunningGateway) -> AsyncIterator[ClientConnection]:
    async with connect(front.ws_url, subprotocols=[SUBPROTOCOL]) as connection:  # type: ignore[list-item]
        yield connection


async def send(socket: ClientConnection, kind: str, **fields: Any) -> None:
    await socket.send(json.dumps({"type": kind} | fields))


async def receive(socket: ClientConnection) -> dict[str, Any]:
    async with asyncio.timeout(5.0):
        message: dict[str, Any] = json.loads(await socket.recv())
    return message


async def until(socket: ClientConnection, kind: str) -> list[dict[str, Any]]:
    messages = [await receive(socket)]
    while messages[-1]["type"] != kind:
        messages.append(await receive(socket))
    return messages


class Reading:
    """What a client has of a generation, checked for holes and repetitions."""

    def __init__(self) -> None:
        self.text = ""
        self.next_index = 0
        self.request_id = ""

    def take(self, messages: list[dict[str, Any]]) -> None:
        for message in messages:
            self.request_id = message.get("request_id", self.request_id)
            if message["type"] == "delta":
                assert message["index"] == self.next_index
                self.next_index += message["num_tokens"]
                self.text += message["text"]


async def read_on(socket: ClientConnection) -> None:
    while True:
        await socket.recv()


async def begin_and_cut(front: RunningGateway, reading: Reading) -> None:
    """Generate, read some of it, then lose the connection without a word."""
    front.worker.stop_before = None
    async with opened(front) as socket:
        await send(socket, "generate", id="a", model=MODEL, prompt=_TEXT)
        while reading.next_index < 5:
            reading.take(await until(socket, "delta"))
        front.worker.gate.clear()
        socket.transport.abort()
        with pytest.raises(ConnectionClosed):
            await read_on(socket)


async def go_on(pair: Pair, front: RunningGateway, reading: Reading) -> None:
    async with opened(front) as socket:
        await send(
            socket,
            "resume",
            id="b",
            request_id=reading.request_id,
            next_index=reading.next_index,
        )
        reading.take(await until(socket, "accepted"))
        pair.worker.gate.set()
        reading.take(await until(socket, "done"))


async def slow(worker: Any) -> asyncio.Task[None]:
    """Let tokens out one by one, so that a client is in the middle for a while."""

    async def drip() -> None:
        while True:
            worker.gate.set()
            await asyncio.sleep(0)
            worker.gate.clear()
            await asyncio.sleep(0.004)

    worker.gate.clear()
    return asyncio.create_task(drip())


async def test_a_lost_socket_goes_on_at_the_same_gateway(pair: Pair) -> None:
    reading = Reading()
    dripping = await slow(pair.worker)
    await begin_and_cut(pair.first, reading)
    dripping.cancel()
    assert reading.next_index < len(_TEXT)
    await go_on(pair, pair.first, reading)
    assert reading.text == _TEXT
    assert not pair.worker.cancelled
    assert len(pair.worker.jobs) == 1
    await eventually(lambda: len(pair.first.gateway.streams) == 0)


async def test_a_lost_socket_goes_on_at_another_gateway(pair: Pair) -> None:
    reading = Reading()
    dripping = await slow(pair.worker)
    await begin_and_cut(pair.first, reading)
    dripping.cancel()
    async with opened(pair.second) as socket:
        await send(
            socket, "resume", id="b", request_id=reading.request_id, next_index=reading.next_index
        )
        reading.take(await until(socket, "accepted"))
        # The first has let go of it, and does not cancel it when its patience is over.
        assert len(pair.first.gateway.streams) == 0
        pair.worker.gate.set()
        reading.take(await until(socket, "done"))
    assert reading.text == _TEXT
    assert not pair.worker.cancelled
    await eventually(lambda: len(pair.second.gateway.streams) == 0)


async def test_a_stream_of_a_gateway_that_died_goes_on(pair: Pair) -> None:
    reading = Reading()
    dripping = await slow(pair.worker)
    async with opened(pair.first) as socket:
        await send(socket, "generate", id="a", model=MODEL, prompt=_TEXT)
        while reading.next_index < 5:
            reading.take(await until(socket, "delta"))
        pair.worker.gate.clear()
        dripping.cancel()
        await pair.kill_first()
        pair.worker.gate.clear()
        socket.transport.abort()
    await go_on(pair, pair.second, reading)
    assert reading.text == _TEXT
    assert len(pair.worker.jobs) == 1


async def test_who_queued_at_a_gateway_that_died_is_served_by_another(pair: Pair) -> None:
    """Not even its first frame came: the other gateway listens in the dead one's place."""
    reading = Reading()
    pair.worker.lose = lambda _frame: True
    pair.worker.gate.clear()
    async with opened(pair.first) as socket:
        await send(socket, "generate", id="a", model=MODEL, prompt=_TEXT)
        reading.take(await until(socket, "accepted"))
        await pair.kill_first()
        socket.transport.abort()
    pair.worker.lose = lambda _frame: False
    await go_on(pair, pair.second, reading)
    assert reading.text == _TEXT


async def test_a_client_that_says_goodbye_is_not_waited_for(pair: Pair) -> None:
    dripping = await slow(pair.worker)
    async with opened(pair.first) as socket:
        await send(socket, "generate", id="a", model=MODEL, prompt=_TEXT)
        await until(socket, "delta")
    await eventually(lambda: len(pair.worker.cancelled) == 1)
    dripping.cancel()


async def test_patience_ends(redis: RedisConfig) -> None:
    config = GatewayConfig(resume_grace_s=0.05)
    async with running_gateway(config, redis=redis) as front:
        front.worker.stop_before = 3
        async with opened(front) as socket:
            await send(socket, "generate", id="a", model=MODEL, prompt=_TEXT)
            await until(socket, "delta")
            socket.transport.abort()
        await eventually(lambda: len(front.worker.cancelled) == 1)
        await eventually(lambda: len(front.gateway.streams) == 0)


async def test_the_newest_connection_has_it(pair: Pair) -> None:
    """A connection that still stands is told, when another one takes its generation."""
    dripping = await slow(pair.worker)
    reading, late = Reading(), Reading()
    async with opened(pair.first) as one, opened(pair.second) as other:
        await send(one, "generate", id="a", model=MODEL, prompt=_TEXT)
        reading.take(await until(one, "delta"))
        await send(other, "resume", id="b", request_id=reading.request_id)
        late.take(await until(other, "done"))
        messages = await until(one, "error")
    dripping.cancel()
    assert late.text == _TEXT
    assert (messages[-1]["code"], messages[-1]["id"]) == ("taken_over", "a")


@pytest.mark.parametrize("next_index", [3, [3]])
async def test_only_the_owner_may_resume_and_what_is_unknown_is_said(
    pair: Pair, next_index: object
) -> None:
    async with opened(pair.first) as socket:
        await send(socket, "resume", id="b", request_id="chatcmpl-0", next_index=next_index)
        error = (await until(socket, "error"))[-1]
    assert (error["code"], error["param"], error["id"]) == ("request_not_found", "request_id", "b")


@pytest.mark.parametrize("next_index", [[1], [], [0, 0, 0], 0, [0, -1]])
async def test_an_index_of_each_choice_must_be_given(pair: Pair, next_index: Any) -> None:
    reading = Reading()
    pair.worker.gate.clear()
    async with opened(pair.first) as socket:
        await send(socket, "generate", id="a", model=MODEL, prompt=_TEXT, n=2)
        reading.take(await until(socket, "accepted"))
        await send(socket, "resume", id="b", request_id=reading.request_id, next_index=next_index)
        error = (await until(socket, "error"))[-1]
        assert (error["code"], error["param"]) == ("invalid_parameter", "next_index")
        pair.worker.gate.set()
        await until(socket, "done")


class Events:
    """An event stream as a client reads it."""

    def __init__(self) -> None:
        self.text = ""
        self.last_id = ""
        self.done = False

    def take(self, line: str) -> None:
        if line.startswith("id: "):
            self.last_id = line.removeprefix("id: ")
        elif line == "data: [DONE]":
            self.done = True
        elif line.startswith("data: "):
            chunk = json.loads(line.removeprefix("data: "))
            for choice in chunk["choices"]:
                self.text += choice["delta"].get("content") or ""


_CHAT = {"model": MODEL, "messages": [{"role": "user", "content": _TEXT}], "stream": True}
_PATH = "/v1/chat/completions"


async def test_an_event_stream_goes_on_after_its_gateway_died(pair: Pair) -> None:
    dripping = await slow(pair.worker)
    events = Events()
    async with (
        httpx.AsyncClient(base_url=pair.first.url, timeout=10) as http,
        http.stream("POST", _PATH, json=_CHAT) as response,
    ):
        async for line in response.aiter_lines():
            events.take(line)
            if len(events.text) >= 6:
                break
        await pair.kill_first()
    dripping.cancel()
    pair.worker.gate.set()
    async with (
        httpx.AsyncClient(base_url=pair.second.url, timeout=10) as http,
        http.stream(
            "POST", _PATH, json=_CHAT, headers={"Last-Event-ID": events.last_id}
        ) as response,
    ):
        assert response.status_code == 200
        async for line in response.aiter_lines():
            events.take(line)
    assert (events.text, events.done) == (_TEXT, True)
    assert len(pair.worker.jobs) == 1


async def test_a_last_event_id_that_is_none(pair: Pair) -> None:
    async with httpx.AsyncClient(base_url=pair.first.url, timeout=10) as http:
        bad = await http.post(_PATH, json=_CHAT, headers={"Last-Event-ID": "nonsense"})
        whole = await http.post(
            _PATH, json=_CHAT | {"stream": False}, headers={"Last-Event-ID": "chatcmpl-0/1"}
        )
        unknown = await http.post(_PATH, json=_CHAT, headers={"Last-Event-ID": "chatcmpl-0/1"})
    assert [bad.status_code, whole.status_code, unknown.status_code] == [400, 400, 404]
    assert bad.json()["error"]["param"] == "last-event-id"


async def test_one_answer_for_one_key(pair: Pair) -> None:
    body = _CHAT | {"stream": False}
    headers = {"Idempotency-Key": "k-1"}
    async with (
        httpx.AsyncClient(base_url=pair.first.url, timeout=10) as http,
        httpx.AsyncClient(base_url=pair.second.url, timeout=10) as other,
    ):
        first = await http.post(_PATH, json=body, headers=headers)
        again = await http.post(_PATH, json=body, headers=headers)
        elsewhere = await other.post(_PATH, json=body, headers=headers)
        pair.worker.forget(first.json()["id"])
        stored = await other.post(_PATH, json=body, headers=headers)
        assert first.status_code == 200
        assert first.json()["choices"][0]["message"]["content"] == _TEXT
        for answer in (again, elsewhere, stored):
            assert answer.json() == first.json()
        assert len(pair.worker.jobs) == 1
        conflict = await http.post(_PATH, json=body | {"seed": 1}, headers=headers)
        assert (conflict.status_code, conflict.json()["error"]["code"]) == (
            409,
            "idempotency_conflict",
        )
        bad = await http.post(_PATH, json=body, headers={"Idempotency-Key": "k" * 256})
        assert bad.json()["error"]["param"] == "idempotency-key"


async def test_equal_requests_at_the_same_time_are_one(pair: Pair) -> None:
    body = _CHAT | {"stream": False}
    headers = {"Idempotency-Key": "k-2"}
    pair.worker.gate.clear()
    async with httpx.AsyncClient(base_url=pair.first.url, timeout=10) as http:
        asking = [
            asyncio.create_task(http.post(_PATH, json=body, headers=headers)) for _ in range(3)
        ]
        await eventually(lambda: len(pair.worker.jobs) == 1)
        await asyncio.sleep(0.2)
        pair.worker.gate.set()
        answers = await asyncio.gather(*asking)
    # The last to come has it; those before are told so.
    statuses = sorted(answer.status_code for answer in answers)
    assert statuses.count(200) >= 1
    assert set(statuses) <= {200, 409}
    assert len(pair.worker.jobs) == 1


async def test_a_key_outlives_its_connection(pair: Pair) -> None:
    dripping = await slow(pair.worker)
    headers = {"Idempotency-Key": "k-3"}
    async with httpx.AsyncClient(base_url=pair.first.url, timeout=10) as http:
        async with http.stream("POST", _PATH, json=_CHAT, headers=headers) as response:
            async for _line in response.aiter_lines():
                break
        await asyncio.sleep(0.1)
        assert not pair.worker.cancelled
        events = Events()
        async with http.stream("POST", _PATH, json=_CHAT, headers=headers) as response:
            async for line in response.aiter_lines():
                events.take(line)
    dripping.cancel()
    assert (events.text, events.done) == (_TEXT, True)
    assert len(pair.worker.jobs) == 1


async def test_a_generation_is_sent_again_with_its_key(pair: Pair) -> None:
    """What a client does that never saw ``accepted``."""
    fields = {"model": MODEL, "prompt": _TEXT, "idempotency_key": "k-4"}
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
    assert (reading.request_id, reading.text) == (first["request_id"], _TEXT)
    assert len(pair.worker.jobs) == 1


def call_then_say(job: Job) -> str:
    """The first round calls a tool, the second one speaks."""
    if job.request_id.endswith("-r1"):
        return "It rains."
    return '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'


@pytest.mark.parametrize("dies", [False, True])
async def test_a_tool_runs_once_though_its_client_goes_elsewhere(
    tmp_path: Path, redis: RedisConfig, dies: bool
) -> None:
    """The other gateway reads the first round again, knows what the tool gave, and goes on."""
    file = tmp_path / "tools.yaml"
    async with tool_server() as server, AsyncExitStack() as stack:
        server.answers["/weather"] = reply('{"sky": "rain"}')
        file.write_text(
            f"tools:\n  weather:\n    url: {server.url('/weather')}\n    allow_private: true\n"
            "    parameters: {type: object, properties: {city: {type: string}}}\n"
        )
        tools = load_tools(str(file), {})
        first = await stack.enter_async_context(
            running_gateway(_CONFIG, gateway_id="gw-1", redis=redis, tools=tools)
        )
        second = await stack.enter_async_context(
            running_gateway(
                _CONFIG, gateway_id="gw-2", redis=redis, tools=tools, broker=first.broker
            )
        )
        pair = Pair(first, second)
        await eventually(lambda: bool(second.gateway.fleet.live_workers()))
        pair.worker.script = call_then_say
        num_tokens = 0
        async with opened(first) as socket:
            messages = [{"role": "user", "content": "Rain?"}]
            await send(
                socket,
                "generate",
                id="a",
                model=MODEL,
                messages=messages,
                server_tools=["weather"],
            )
            seen = await until(socket, "tool_step")
            num_tokens = sum(m["num_tokens"] for m in seen if m["type"] == "delta")
            if dies:
                await pair.kill_first()
            socket.transport.abort()
        async with opened(second) as socket:
            await send(
                socket,
                "resume",
                id="b",
                request_id=seen[0]["request_id"],
                next_index=num_tokens,
            )
            rest = await until(socket, "done")
    assert "".join(m["text"] for m in rest if m["type"] == "delta") == "It rains."
    steps = [m["call_id"] for m in rest if m["type"] == "tool_step"]
    assert steps in ([], [seen[-1]["call_id"]])
    assert len(server.seen) == 1
    assert len(pair.worker.jobs) == 2
