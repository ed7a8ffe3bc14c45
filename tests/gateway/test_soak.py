"""Clients that come, go and stall at random leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random

import httpx
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from millrace.runtime.metrics_server import render
from millrace.schemas.config import GatewayConfig
from millrace.schemas.websocket import SUBPROTOCOL
from tests.support.running_gateway import MODEL, RunningGateway, running_gateway
from tests.support.waiting import eventually

_NUM_CLIENTS = 40


async def test_nothing_is_left_of_clients_that_come_and_go() -> None:
    choice = random.Random(5)
    async with running_gateway(GatewayConfig(client_buffer_bytes=20_000)) as front:
        front.worker.tokens_per_frame = 3
        await asyncio.sleep(0)
        tasks_before = len(asyncio.all_tasks())
        await asyncio.gather(*(_client(front, choice.random()) for _ in range(_NUM_CLIENTS)))
        await eventually(lambda: len(front.gateway.streams) == 0)
        await eventually(lambda: front.worker.num_running == 0)
        await eventually(lambda: len(asyncio.all_tasks()) <= tasks_before)
        metrics = render(front.gateway.metrics.registry).decode()
        outcomes = [
            float(line.rsplit(" ", 1)[1])
            for line in metrics.splitlines()
            if line.startswith("millrace_generations_total{")
        ]
        assert sum(outcomes) == len(front.worker.jobs)
        assert await front.worker.bus.outbox.last_sequence() == len(front.worker.jobs)


async def _client(front: RunningGateway, lot: float) -> None:
    prompt = "a token for everybody, and again " * 20
    linger_s = 0.02 + lot / 10
    if lot < 0.5:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 600, "stream": lot < 0.25}
        async with httpx.AsyncClient(base_url=front.url) as http:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(linger_s if lot < 0.4 else 20):
                    await http.post("/v1/completions", json=body)
        return
    message = {"type": "generate", "model": MODEL, "prompt": prompt}
    async with connect(front.ws_url, subprotocols=[SUBPROTOCOL]) as socket:  # type: ignore[list-item]
        for name in ("a", "b"):
            await socket.send(json.dumps(message | {"id": name}))
        with contextlib.suppress(TimeoutError, ConnectionClosed):
            async with asyncio.timeout(linger_s):
                while lot < 0.9:
                    await socket.recv()
                await asyncio.Event().wait()
