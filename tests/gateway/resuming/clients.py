"""Gateways of one system, and clients that check their streams for gaps and repetitions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from millrace.bus.memory import MemoryBroker, MemoryBus
from millrace.schemas.config import GatewayConfig
from millrace.schemas.websocket import SUBPROTOCOL
from tests.support.running_gateway import MODEL, RunningGateway

TAKES_EVENTS = {"accept": "text/event-stream"}
TEXT = "the mill turns as long as the water runs"
CONFIG = GatewayConfig(replay_probe_s=0.2, resume_grace_s=5.0)


class Pair:
    """Two gateways of one system; the worker belongs to the first's side of the bus."""

    def __init__(self, first: RunningGateway, second: RunningGateway) -> None:
        self.first = first
        self.second = second
        self.worker = first.worker

    async def kill_first(self) -> None:
        """Cut the first gateway off the bus: it sends and receives nothing."""
        bus = self.first.gateway.bus
        assert isinstance(bus, MemoryBus)
        bus.control = MemoryBus(MemoryBroker()).control
        await bus.close()


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
    """Part of a generation that a client has read, checked for gaps and repetitions."""

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


async def begin_and_cut(
    front: RunningGateway, reading: Reading, dripping: asyncio.Task[None]
) -> None:
    """Generate, read some of it as it drips, then lose the connection without a word; no token
    comes after that."""
    front.worker.stop_before = None
    async with opened(front) as socket:
        await send(socket, "generate", id="a", model=MODEL, prompt=TEXT)
        while reading.next_index < 5:
            reading.take(await until(socket, "delta"))
        dripping.cancel()
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


CHAT = {"model": MODEL, "messages": [{"role": "user", "content": TEXT}], "stream": True}
PATH = "/v1/chat/completions"
