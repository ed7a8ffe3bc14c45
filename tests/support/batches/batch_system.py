"""Gateways that run batches, over the bus in memory or a real one, with a real Redis."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal

import msgspec
import openai
from openai.types import Batch

from millrace.bus import nats
from millrace.bus.api import Bus
from millrace.bus.memory import MemoryBroker, MemoryBus
from millrace.bus.nats.permissions import Part
from millrace.gateway.core import Backends, Gateway, new_gateway_id
from millrace.gateway.server import Server, listen
from millrace.runtime.clock import SystemClock
from millrace.runtime.redis.link import RedisLink
from millrace.schemas.config import Config, GatewayConfig, NatsConfig, RedisConfig
from tests.support.batches.batch_worker import BatchWorker
from tests.support.running_gateway import MODEL, byte_models
from tests.support.waiting import eventually

CHAT: Literal["/v1/chat/completions"] = "/v1/chat/completions"
LEASE_S = 1.0
SCAN_S = 0.05
# Longer than a test, so that jobs that wait behind a worker's gate are not delivered again.
NATS = NatsConfig(ack_wait_s=60.0)

Connect = Callable[[str], Awaitable[Bus]]
Line = dict[str, Any]


def in_memory() -> Connect:
    """Connections to one broker in memory."""
    broker = MemoryBroker(config=NATS)

    async def connect(_name: str) -> Bus:
        return MemoryBus(broker)

    return connect


def on_nats(url: str) -> Connect:
    """Connections to a nats-server."""
    config = msgspec.structs.replace(NATS, url=url)

    async def connect(name: str) -> Bus:
        return await nats.connect(config, name, part=Part.SCHEDULER)

    return connect


class BatchGateway:
    """Gateway with its own connections and a client, for tests of batches."""

    def __init__(self, gateway: Gateway, server: Server, client: openai.AsyncOpenAI) -> None:
        self.gateway = gateway
        self.server = server
        self.client = client

    async def die(self) -> None:
        """Be gone from bus and Redis at once, as if the process were killed."""
        assert self.gateway.redis is not None
        await self.gateway.redis.close()
        await self.gateway.bus.close()
        # Its batches in memory must not reach any client.
        for running in self.server._batches._runs.values():
            running.task.cancel()

    async def upload(self, data: bytes) -> str:
        file = await self.client.files.create(file=("in.jsonl", data), purpose="batch")
        return file.id

    async def begin(self, lines: list[Line], endpoint: Any = CHAT) -> Batch:
        data = b"\n".join(json.dumps(line).encode() for line in lines)
        return await self.client.batches.create(
            input_file_id=await self.upload(data), endpoint=endpoint, completion_window="24h"
        )

    async def end(self, batch: Batch, timeout_s: float = 30.0) -> Batch:
        """The batch once it has ended."""
        found = batch

        async def is_over() -> bool:
            nonlocal found
            found = await self.client.batches.retrieve(batch.id)
            return found.status in ("completed", "failed", "expired", "cancelled")

        await eventually(is_over, timeout_s, "the batch's end")
        return found

    async def lines(self, file_id: str | None) -> list[Line]:
        """The lines of an output or error file; none if there is no file."""
        if file_id is None:
            return []
        content = await self.client.files.content(file_id)
        return [json.loads(line) for line in content.text.splitlines()]


@asynccontextmanager
async def batch_gateway(
    connect: Connect, redis: RedisConfig | None, config: GatewayConfig | None = None
) -> AsyncIterator[BatchGateway]:
    """Serve on a free port until the block ends. Several may share bus and Redis."""
    config = msgspec.structs.replace(
        config or GatewayConfig(),
        host="127.0.0.1",
        port=0,
        gateway_id=new_gateway_id(),
        batch_lease_s=LEASE_S,
        batch_scan_s=SCAN_S,
    )
    bus = await connect("gateway")
    link = None if redis is None else RedisLink(redis)
    gateway = Gateway(
        Backends(bus, link), Config(gateway=config), byte_models(), SystemClock(), random.Random(7)
    )
    server = Server(gateway, listen(config), tune=False)
    serving = asyncio.create_task(server.serve())
    await server.wait_started()
    url = f"http://127.0.0.1:{server.port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        try:
            yield BatchGateway(gateway, server, client)
        finally:
            await server.stop(drain_timeout_s=0.0)
            await serving
            await bus.close()
            if link is not None:
                await link.close()


@asynccontextmanager
async def batch_worker(connect: Connect) -> AsyncIterator[BatchWorker]:
    """A worker on a connection of its own."""
    bus = await connect("worker")
    worker = BatchWorker(bus)
    await worker.start()
    try:
        yield worker
    finally:
        worker.gate.set()
        await worker.close()
        await bus.close()


def chat_line(custom_id: str, content: str, **more: Any) -> Line:
    """A line of a batch for ``CHAT``."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}], **more}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}


def by_id(lines: list[Line]) -> dict[str, Line]:
    """Lines of an output or error file by their ids, each of which is there once."""
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines), "a request was answered twice"
    return found
