"""What a token costs in the gateway: from nats-server to 200 clients, by WebSocket and by SSE.

    python -m benchmarks.gateway_relay [--clients 200] [--seconds 4] [--json FILE]

A scripted worker sends one token to every stream in each step, first at a steady pace that the
gateway follows token by token, then as fast as it can, so that tokens gather. Cost is the gateway
process's CPU time per token. Beside it stand two floors that no gateway gets under: the same
messages received and decoded by the bus's reader and thrown away, and a write of a token's size to
each client by a bare uvloop server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from pathlib import Path
from typing import cast

import msgspec
import psutil
import uvloop

from bus import nats
from bus.clock import SystemClock
from bus.nats import NatsBus
from gateway.core import Gateway
from gateway.models import Models
from gateway.server import Server, listen, tune_gc
from schemas.config import GatewayConfig, NatsConfig
from schemas.frames import Delta, Done, FinishReason, Frame, Started, Usage
from schemas.jobs import Job
from schemas.openai import ModelCard
from tests.support.servers import NatsServer

_MODEL = "relay"
_WARM_UP_STEPS = 50
_PACE_STEPS_PER_S = 60
_TEXT = " token"
_TOKEN_BYTES = 200
_SPAWN = multiprocessing.get_context("spawn")


class _NoTokenizer:
    """Every text is one token: what is measured comes after it."""

    def encode(self, _text: str, _add_special_tokens: bool = True) -> list[int]:
        return [1]

    def encode_chat(self, _messages: object, _tools: object = ()) -> list[int]:
        return [1]


class _RelayModel:
    tokenizer = _NoTokenizer()
    context_window_tokens = 1_000_000

    def prepare(self, job: Job, _seed_source: random.Random) -> Job:
        sampling = msgspec.structs.replace(job.sampling, max_tokens=1_000, seed=0)
        return msgspec.structs.replace(
            job, messages=None, prompt=None, prompt_token_ids=(1,), sampling=sampling
        )


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One run. ``tokens_per_core_s`` is what one core would carry at this cost."""

    path: str
    pace: str
    num_clients: int
    num_tokens: int
    wall_s: float
    cpu_us_per_token: float
    tokens_per_s: float
    tokens_per_core_s: float


# The processes: a gateway, a reader that does nothing, and clients that only count.


def _run_gateway(nats_url: str, port: Queue[int]) -> None:
    async def serve() -> None:
        bus = await nats.connect(NatsConfig(url=nats_url), "relay gateway")
        card = ModelCard(id=_MODEL, created=0, max_model_len=None)
        models = Models({_MODEL: card}, lambda _name: _RelayModel())
        config = GatewayConfig(port=0, gateway_id="relay", max_generations_per_socket=1)
        server = Server(Gateway(bus, config, models, SystemClock()), listen(config))
        port.put(server.port)
        await server.serve()

    uvloop.run(serve())


def _run_floor(nats_url: str, seen: Queue[int], num_tokens: int) -> None:
    async def read() -> None:
        bus = await nats.connect(NatsConfig(url=nats_url), "relay floor")
        done = asyncio.Event()
        count = 0

        def on_frame(_request_id: str, _frame: Frame) -> None:
            nonlocal count
            count += 1
            if count == num_tokens:
                done.set()

        await bus.frames.subscribe("floor", on_frame)
        tune_gc()
        seen.put(0)
        await done.wait()
        seen.put(count)
        await asyncio.Event().wait()

    uvloop.run(read())


def _run_writer(port: Queue[int], num_clients: int, num_steps: int) -> None:
    """Write to every client at the worker's pace, and nothing else."""
    transports: list[asyncio.Transport] = []
    connected = asyncio.Event()

    class Protocol(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            transports.append(cast("asyncio.Transport", transport))
            if len(transports) == num_clients:
                connected.set()

    async def write() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(Protocol, "127.0.0.1", 0)
        port.put(server.sockets[0].getsockname()[1])
        await connected.wait()
        start_s = time.perf_counter()
        before_s = time.process_time()
        for step in range(num_steps):
            for transport in transports:
                transport.write(b"x" * _TOKEN_BYTES)
            late_s = time.perf_counter() - start_s - (step + 1) / _PACE_STEPS_PER_S
            await asyncio.sleep(max(0.0, -late_s))
        port.put(round((time.process_time() - before_s) * 1e9))
        for transport in transports:
            transport.write(b"[DONE]")
        await asyncio.Event().wait()

    uvloop.run(write())


def _run_clients(port: int, path: str, num_clients: int, ended: Queue[int]) -> None:
    """Open all streams, read until each has its end, report how many bytes that was."""

    async def one(greeting: bytes, request: bytes, last: bytes) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
        if greeting:
            writer.write(greeting)
            await reader.readuntil(b"\r\n\r\n")
        writer.write(request)
        num_bytes, tail = 0, b""
        while last not in tail:
            data = await reader.read(1 << 18)
            if not data:
                raise ConnectionError("the gateway closed a stream before its end")
            num_bytes += len(data)
            tail = tail[-64:] + data
        writer.close()
        return num_bytes

    async def run() -> None:
        if path == "websocket":
            exchange = (_HANDSHAKE, _websocket_message(), b'"type":"done"')
        else:
            exchange = (b"", _sse_request(), b"[DONE]")
        ended.put(sum(await asyncio.gather(*(one(*exchange) for _ in range(num_clients)))))

    uvloop.run(run())


_HANDSHAKE = (
    b"GET /v1/ws HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
    b"sec-websocket-protocol: millrace.v1\r\n\r\n"
)


def _sse_request() -> bytes:
    body = json.dumps(
        {"model": _MODEL, "stream": True, "messages": [{"role": "user", "content": "go"}]}
    ).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _websocket_message() -> bytes:
    """One text frame, masked with zeros."""
    message = json.dumps({"type": "generate", "id": "a", "model": _MODEL, "prompt": "go"}).encode()
    assert len(message) < 126
    return bytes([0x81, 0x80 | len(message), 0, 0, 0, 0]) + message


# The scripted worker.


class _Worker:
    """Sends one token to each of many streams in each step, as one envelope."""

    def __init__(self, bus: NatsBus, reply: str, request_ids: list[str]) -> None:
        self._bus = bus
        self._reply = reply
        self._request_ids = request_ids
        self._index = 0

    async def send_all(self, make: Callable[[], Frame]) -> None:
        frame = make()
        await self._bus.frames.publish(
            self._reply, [(request_id, frame) for request_id in self._request_ids], batch=True
        )

    async def step(self) -> None:
        index = self._index
        self._index += 1
        await self.send_all(lambda: Delta(index=index, token_ids=(7,), text=_TEXT))

    async def steps(self, num_steps: int, pace_steps_per_s: float | None) -> None:
        """At a steady pace, or as fast as the server takes them."""
        start_s = time.perf_counter()
        for step in range(num_steps):
            await self.step()
            if pace_steps_per_s is None:
                await asyncio.sleep(0)
            else:
                late_s = time.perf_counter() - start_s - (step + 1) / pace_steps_per_s
                await asyncio.sleep(max(0.0, -late_s))

    async def end(self) -> None:
        total = self._index
        await self.send_all(lambda: Usage(prompt_tokens=1, completion_tokens=total))
        await self.send_all(lambda: Done(finish_reason=FinishReason.LENGTH, num_tokens=total))


async def _take_jobs(bus: NatsBus, num_jobs: int) -> list[str]:
    jobs: list[str] = []
    async with asyncio.timeout(20):
        while len(jobs) < num_jobs:
            for leased in await bus.jobs.pull(_MODEL, num_jobs - len(jobs), 1.0):
                jobs.append(leased.job.request_id)
                await bus.jobs.ack(leased.lease)
    return jobs


# The measurements.


def _cpu_s(process: BaseProcess) -> float:
    times = psutil.Process(process.pid).cpu_times()
    return times.user + times.system


async def _relay(
    bus: NatsBus,
    gateway: BaseProcess,
    port: int,
    path: str,
    num_clients: int,
    num_steps: int,
    pace: str,
) -> Figures:
    ended: Queue[int] = _SPAWN.Queue()
    clients = _SPAWN.Process(
        target=_run_clients, args=(port, path, num_clients, ended), daemon=True
    )
    clients.start()
    worker = _Worker(bus, "relay", await _take_jobs(bus, num_clients))
    await worker.send_all(lambda: Started(worker_id="scripted", num_prompt_tokens=1))
    await worker.steps(_WARM_UP_STEPS, _PACE_STEPS_PER_S)
    cpu_s, start_s = _cpu_s(gateway), time.perf_counter()
    await worker.steps(num_steps, _PACE_STEPS_PER_S if pace == "steady" else None)
    await worker.end()
    await asyncio.to_thread(ended.get, True, 30)
    wall_s, cpu_s = time.perf_counter() - start_s, _cpu_s(gateway) - cpu_s
    clients.join()
    return _figures(path, pace, num_clients, num_steps * num_clients, wall_s, cpu_s)


async def _write_floor(num_clients: int, num_steps: int) -> Figures:
    numbers: Queue[int] = _SPAWN.Queue()
    ended: Queue[int] = _SPAWN.Queue()
    writer = _SPAWN.Process(target=_run_writer, args=(numbers, num_clients, num_steps), daemon=True)
    writer.start()
    port = await asyncio.to_thread(numbers.get, True, 20)
    clients = _SPAWN.Process(
        target=_run_clients, args=(port, "sse", num_clients, ended), daemon=True
    )
    clients.start()
    start_s = time.perf_counter()
    cpu_s = await asyncio.to_thread(numbers.get, True, 60) / 1e9
    wall_s = time.perf_counter() - start_s
    await asyncio.to_thread(ended.get, True, 30)
    clients.join()
    writer.terminate()
    writer.join()
    return _figures("write only", "steady", num_clients, num_clients * num_steps, wall_s, cpu_s)


async def _floor(bus: NatsBus, nats_url: str, num_clients: int, num_steps: int) -> Figures:
    seen: Queue[int] = _SPAWN.Queue()
    num_tokens = num_clients * num_steps
    reader = _SPAWN.Process(target=_run_floor, args=(nats_url, seen, num_tokens), daemon=True)
    reader.start()
    await asyncio.to_thread(seen.get, True, 20)
    worker = _Worker(bus, "floor", [f"chatcmpl-{n:024x}" for n in range(num_clients)])
    cpu_s, start_s = _cpu_s(reader), time.perf_counter()
    await worker.steps(num_steps, _PACE_STEPS_PER_S)
    await asyncio.to_thread(seen.get, True, 30)
    wall_s, cpu_s = time.perf_counter() - start_s, _cpu_s(reader) - cpu_s
    reader.terminate()
    reader.join()
    return _figures("receive only", "steady", num_clients, num_tokens, wall_s, cpu_s)


def _figures(
    path: str, pace: str, num_clients: int, num_tokens: int, wall_s: float, cpu_s: float
) -> Figures:
    return Figures(
        path=path,
        pace=pace,
        num_clients=num_clients,
        num_tokens=num_tokens,
        wall_s=wall_s,
        cpu_us_per_token=cpu_s / num_tokens * 1e6,
        tokens_per_s=num_tokens / wall_s,
        tokens_per_core_s=num_tokens / cpu_s,
    )


async def _measure(nats_url: str, num_clients: int, seconds: float) -> list[Figures]:
    bus = await nats.connect(NatsConfig(url=nats_url), "relay worker")
    ports: Queue[int] = _SPAWN.Queue()
    gateway = _SPAWN.Process(target=_run_gateway, args=(nats_url, ports), daemon=True)
    gateway.start()
    num_steps = round(seconds * _PACE_STEPS_PER_S)
    try:
        port = await asyncio.to_thread(ports.get, True, 20)
        results = [
            await _floor(bus, nats_url, num_clients, num_steps),
            await _write_floor(num_clients, num_steps),
        ]
        for path in ("websocket", "sse"):
            for pace in ("steady", "flat out"):
                factor = 1 if pace == "steady" else 4
                results.append(
                    await _relay(bus, gateway, port, path, num_clients, num_steps * factor, pace)
                )
    finally:
        gateway.terminate()
        gateway.join()
        await bus.close()
    return results


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each steady run")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = NatsServer(Path(folder))
        server.start()
        try:
            results = uvloop.run(_measure(server.url, arguments.clients, arguments.seconds))
        finally:
            server.stop()
    print(f"{'path':<14}{'pace':<10}{'tokens/s':>10}{'CPU us/token':>14}{'tokens/s per core':>19}")
    for run in results:
        print(
            f"{run.path:<14}{run.pace:<10}{run.tokens_per_s:>10,.0f}{run.cpu_us_per_token:>14.2f}"
            f"{run.tokens_per_core_s:>19,.0f}"
        )
    if arguments.json:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
