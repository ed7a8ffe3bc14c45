"""Events between two rounds of an answer.

They happen while the gateway's own tool runs, or while the next round's job is on its way to the
queue.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any, Protocol

import httpx
import pytest
import yaml
from redis.asyncio import Redis
from websockets.asyncio.client import ClientConnection, connect

from millrace.bus.job_queue import PublishedJob
from millrace.bus.tenancy.accounts import Demand
from millrace.bus.tenancy.keeper import Granted
from millrace.gateway.tenancy.identity import Caller
from millrace.gateway.tools.catalogue import ToolCatalogue, load_tools
from millrace.schemas.config import GatewayConfig, RedisConfig
from millrace.schemas.errors import BusUnavailableError
from millrace.schemas.frames import Usage
from millrace.schemas.jobs import Job
from millrace.schemas.websocket import SUBPROTOCOL
from tests.gateway.resuming.clients import Pair
from tests.gateway.resuming.test_event_ids import whole_and_rests
from tests.support.running_gateway import MODEL, RunningGateway, running_gateway
from tests.support.servers import RedisServer
from tests.support.tool_server import Seen, ToolServer, Write, reply, tool_server
from tests.support.waiting import eventually

_CONFIG = GatewayConfig(replay_probe_s=0.2, resume_grace_s=5.0)
_ASKED: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Rain?"}],
    "server_tools": ["weather"],
}
_PATH = "/v1/chat/completions"


class Publish(Protocol):
    """``bus.job_queue.JobQueue.publish``."""

    def __call__(self, job: Job, *, reserved: bool = False) -> Awaitable[PublishedJob]: ...


class Place:
    """A gateway with a tool; ``open_tool`` lets the tool answer."""

    def __init__(
        self, stack: AsyncExitStack, tools: ToolCatalogue, server: ToolServer, redis: RedisConfig
    ) -> None:
        self._stack = stack
        self._tools = tools
        self._redis = redis
        self.server = server
        self.tool_gate = asyncio.Event()
        self.tool_gate.set()
        server.answers["/weather"] = self._answer

    async def _answer(self, seen: Seen, write: Write) -> None:
        await self.tool_gate.wait()
        await reply('{"sky": "rain"}')(seen, write)

    async def gateway(
        self, gateway_id: str = "gw-1", first: RunningGateway | None = None
    ) -> RunningGateway:
        front = await self._stack.enter_async_context(
            running_gateway(
                _CONFIG,
                gateway_id=gateway_id,
                redis=self._redis,
                tools=self._tools,
                broker=None if first is None else first.broker,
            )
        )
        front.worker.script = _call_then_say
        await eventually(lambda: bool(front.gateway.fleet.live_workers()))
        return front


def _call_then_say(job: Job) -> str:
    if job.request_id.endswith("-r1"):
        return "It rains."
    return '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'


@pytest.fixture
async def place(tmp_path: Path, redis_server: RedisServer) -> AsyncIterator[Place]:
    client = Redis.from_url(redis_server.url)
    await client.flushall()
    await client.aclose()
    async with tool_server() as server, AsyncExitStack() as stack:
        file = tmp_path / "tools.yaml"
        entry = {
            "url": server.url("/weather"),
            "allow_private": True,
            "parameters": {"type": "object"},
        }
        file.write_text(yaml.safe_dump({"tools": {"weather": entry}}))
        redis = RedisConfig(url=f"{redis_server.url}/0")
        yield Place(stack, load_tools(str(file), {}), server, redis)


def on_second_round(
    monkeypatch: pytest.MonkeyPatch,
    front: RunningGateway,
    publish: Callable[[Publish, Job], Awaitable[PublishedJob]],
) -> None:
    """Have the job of a second round published by ``publish``, which gets the real way to do it."""
    jobs = front.gateway.bus.jobs
    real: Publish = jobs.publish

    async def instead(job: Job, *, reserved: bool = False) -> PublishedJob:
        assert reserved
        if job.request_id.endswith("-r1"):
            return await publish(real, job)
        return await real(job, reserved=True)

    monkeypatch.setattr(jobs, "publish", instead)


@asynccontextmanager
async def opened(front: RunningGateway) -> AsyncIterator[ClientConnection]:
    async with connect(front.ws_url, subprotocols=[SUBPROTOCOL]) as connection:  # type: ignore[list-item]
        yield connection


async def send(socket: ClientConnection, kind: str, **fields: Any) -> None:
    await socket.send(json.dumps({"type": kind} | fields))


async def until(socket: ClientConnection, kind: str) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    async with asyncio.timeout(5.0):
        while not messages or messages[-1]["type"] != kind:
            messages.append(json.loads(await socket.recv()))
    return messages


def text_of(messages: list[dict[str, Any]]) -> str:
    return "".join(message["text"] for message in messages if message["type"] == "delta")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (_PATH, _ASKED | {"n": 2, "stream_options": {"include_usage": True}}),
        (
            "/v1/responses",
            {
                "model": MODEL,
                "input": "Rain?",
                "store": False,
                "tools": [{"type": "server", "name": "weather"}],
            },
        ),
    ],
)
async def test_a_tool_answer_resumed_after_any_event_sends_the_rest(
    place: Place, path: str, body: dict[str, Any]
) -> None:
    first = await place.gateway()
    second = await place.gateway("gw-2", first)
    await whole_and_rests(Pair(first, second), path, body, 1)


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_round_that_cannot_begin_is_told(
    place: Place, monkeypatch: pytest.MonkeyPatch, streamed: bool
) -> None:
    """The client has read the tool's result by then and waits for the next round only."""
    front = await place.gateway()

    async def publish(_real: Publish, _job: Job) -> PublishedJob:
        await asyncio.sleep(0.05)
        raise BusUnavailableError("The message bus is unreachable.")

    on_second_round(monkeypatch, front, publish)
    async with httpx.AsyncClient(base_url=front.url, timeout=5) as http:
        answer = await http.post(_PATH, json=_ASKED | {"stream": streamed})
    assert "bus_unavailable" in answer.text
    assert answer.status_code == (200 if streamed else 503)
    assert not front.gateway.responses.all()


async def test_a_cancel_between_rounds_is_answered(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    front, release = await place.gateway(), asyncio.Event()

    async def publish(real: Publish, job: Job) -> PublishedJob:
        await release.wait()
        return await real(job, reserved=True)

    on_second_round(monkeypatch, front, publish)
    async with opened(front) as socket:
        await send(socket, "generate", id="a", **_ASKED)
        await until(socket, "tool_step")
        await send(socket, "cancel", id="a")
        done = (await until(socket, "done"))[-1]
    release.set()
    assert done["finish_reason"] == "cancelled"
    await eventually(lambda: len(front.gateway.streams) == 0 and not front.gateway.responses.all())


async def test_a_round_may_be_over_before_the_queue_has_answered(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    front = await place.gateway()

    async def publish(real: Publish, job: Job) -> PublishedJob:
        published = await real(job, reserved=True)
        await eventually(lambda: len(front.worker.jobs) == 2 and not front.worker.num_running)
        await asyncio.sleep(0.05)
        return published

    on_second_round(monkeypatch, front, publish)
    async with httpx.AsyncClient(base_url=front.url, timeout=5) as http:
        answer = await http.post(_PATH, json=_ASKED)
    assert answer.json()["choices"][0]["message"]["content"] == "It rains."
    async with opened(front) as socket:
        front.worker.jobs.clear()
        await send(socket, "generate", id="a", **_ASKED)
        assert text_of(await until(socket, "done")) == "It rains."


async def test_an_answer_that_is_left_between_rounds_ends(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is held for a client that returns in time; otherwise nothing of it remains."""
    front, release = await place.gateway(), asyncio.Event()

    async def publish(real: Publish, job: Job) -> PublishedJob:
        await release.wait()
        return await real(job, reserved=True)

    on_second_round(monkeypatch, front, publish)
    async with opened(front) as socket:
        await send(socket, "generate", id="a", **_ASKED)
        await until(socket, "tool_step")
        socket.transport.abort()
    await eventually(lambda: not front.gateway.sockets)
    release.set()
    await eventually(lambda: len(front.worker.jobs) == 2)
    await eventually(lambda: len(front.gateway.streams) == 0 and not front.gateway.responses.all())
    assert not front.worker.cancelled


async def test_a_client_that_takes_over_between_rounds_is_not_cut_off(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    front, release = await place.gateway(), asyncio.Event()
    num_published = 0

    async def publish(real: Publish, job: Job) -> PublishedJob:
        nonlocal num_published
        num_published += 1
        if num_published == 1:
            await release.wait()
        return await real(job, reserved=True)

    on_second_round(monkeypatch, front, publish)
    front.worker.gate.set()
    async with opened(front) as one, opened(front) as other:
        await send(one, "generate", id="a", **_ASKED)
        request_id = (await until(one, "tool_step"))[0]["request_id"]
        await eventually(lambda: num_published == 1)
        await send(other, "resume", id="b", request_id=request_id)
        assert (await until(one, "error"))[-1]["code"] == "taken_over"
        await eventually(lambda: num_published == 2)
        release.set()
        assert text_of(await until(other, "done")) == "It rains."
    assert not front.worker.cancelled
    assert len(place.server.seen) == 1
    await eventually(lambda: len(front.gateway.streams) == 0 and not front.gateway.responses.all())


@pytest.mark.parametrize("step", ["reserve", "publish"])
async def test_who_takes_an_answer_over_has_what_is_reserved_for_its_round(
    place: Place, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The one before has come as far as ``step`` by then, and fails at the latest there."""
    front, release = await place.gateway(), asyncio.Event()
    limiter = front.gateway.limiter
    reserve, settle_soon = limiter.reserve, limiter.settle_soon
    waiting: list[str] = []
    num_published = 0
    settled: list[Usage | None] = []

    async def wait_once(at: str) -> bool:
        if step != at or waiting:
            return False
        waiting.append(at)
        await release.wait()
        waiting.append("over")
        return True

    async def slow_reserve(caller: Caller, demand: Demand) -> Granted:
        granted = await reserve(caller, demand)
        if demand.request_id.endswith("-r1"):
            await wait_once("reserve")
        return granted

    async def publish(real: Publish, job: Job) -> PublishedJob:
        nonlocal num_published
        if await wait_once("publish"):
            raise BusUnavailableError("The message bus is unreachable.")
        num_published += 1
        return await real(job, reserved=True)

    def note(request_id: str, usage: Usage | None, cost: Decimal | None, *more: str) -> None:
        if request_id.endswith("-r1"):
            settled.append(usage)
        settle_soon(request_id, usage, cost, *more)

    monkeypatch.setattr(limiter, "reserve", slow_reserve)
    monkeypatch.setattr(limiter, "settle_soon", note)
    on_second_round(monkeypatch, front, publish)
    async with opened(front) as one, opened(front) as other:
        await send(one, "generate", id="a", **_ASKED)
        request_id = (await until(one, "tool_step"))[0]["request_id"]
        await eventually(lambda: bool(waiting))
        front.worker.gate.clear()
        await send(other, "resume", id="b", request_id=request_id)
        assert (await until(one, "error"))[-1]["code"] == "taken_over"
        front.worker.gate.set()
        await eventually(lambda: num_published == 1)
        release.set()
        await eventually(lambda: waiting[-1] == "over")
        assert text_of(await until(other, "done")) == "It rains."
    await eventually(lambda: len(front.gateway.streams) == 0 and not front.gateway.responses.all())
    assert [usage is not None for usage in settled] == [True]
    assert num_published == 1


async def test_the_next_round_speaks_to_the_gateway_that_has_the_answer_now(place: Place) -> None:
    """The gateway that the answer began at lives, and knows of no further round."""
    first = await place.gateway()
    second = await place.gateway("gw-2", first)
    place.tool_gate.clear()
    async with opened(first) as one, opened(second) as other:
        await send(one, "generate", id="a", **_ASKED)
        started = await until(one, "started")
        await eventually(lambda: len(place.server.seen) == 1)
        await send(other, "resume", id="b", request_id=started[0]["request_id"])
        await until(other, "accepted")
        await until(one, "error")
        place.tool_gate.set()
        assert text_of(await until(other, "done")) == "It rains."
    assert [job.reply for job in first.worker.jobs] == ["gw-1", "gw-2"]


async def test_a_stopping_gateway_waits_for_tools(place: Place) -> None:
    front = await place.gateway()
    place.tool_gate.clear()
    async with httpx.AsyncClient(base_url=front.url, timeout=10) as http:
        asking = asyncio.create_task(http.post(_PATH, json=_ASKED))
        await eventually(lambda: len(place.server.seen) == 1)
        draining = asyncio.create_task(front.gateway.drain(5.0))
        await eventually(lambda: front.gateway.draining)
        await asyncio.sleep(0)
        assert not draining.done()
        place.tool_gate.set()
        answer = await asking
        await draining
    assert answer.json()["choices"][0]["message"]["content"] == "It rains."
