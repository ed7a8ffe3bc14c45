"""Cost of a token in the gateway: from nats-server to 200 clients, by WebSocket and by SSE.

    python -m benchmarks.gateway --only relay [--clients 200] [--seconds 4] [--json FILE]

A scripted worker sends one token to every stream in each step: first at a steady pace that the
gateway follows token by token (uncoalesced), then as fast as it can, so that tokens leave in groups
(coalesced). The figure is tokens over the gateway's CPU time, that is, tokens per second of one
core. Beside it is the raw stack, the same libraries with a bare handler between them
(``benchmarks.support.raw_stack``), and two floors: the same messages received, decoded by the bus's
reader and dropped, and a write of a token's size to each client by a bare uvloop server.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from multiprocessing.queues import Queue
from typing import cast

import msgspec
import uvloop

from benchmarks.support.command import PartResult
from benchmarks.support.figures import table
from benchmarks.support.gateway_process import (
    GATEWAY_ID,
    HANDSHAKE,
    GatewayProcess,
    running_gateway,
    socket_request,
    sse_request,
)
from benchmarks.support.processes import SPAWN, ProcessUsage, spawned
from benchmarks.support.raw_stack import REPLY, RawStack, raw_stack, request_id
from benchmarks.support.simulated_worker import LockstepWorker, take_jobs
from millrace.bus import nats
from millrace.bus.nats import NatsBus
from millrace.bus.nats.permissions import Part
from millrace.gateway.server import tune_gc
from millrace.schemas.config import NatsConfig
from millrace.schemas.frames import Frame

_WARM_UP_STEPS = 50
_PACE_STEPS_PER_S = 60
_COALESCED_FACTOR = 4
_TOKEN_BYTES = 200
_TIMEOUT_S = 60.0
_FLOOR = "floor"
_GOALS = {"uncoalesced": 60_000, "coalesced": 100_000}


class Figures(msgspec.Struct, frozen=True):
    """Figures of one run; ``tokens_per_core_s`` is the rate of one core at this cost."""

    system: str
    path: str
    mode: str
    num_clients: int
    num_tokens: int
    wall_s: float
    cpu_us_per_token: float
    tokens_per_s: float
    tokens_per_core_s: float


# Processes: a reader that drops messages, a writer that reads nothing, clients that only count.


def _run_reader(nats_url: str, seen: Queue[int], num_tokens: int) -> None:
    async def read() -> None:
        bus = await nats.connect(NatsConfig(url=nats_url), "relay floor", part=Part.SCHEDULER)
        done = asyncio.Event()
        count = 0

        def on_frame(_request_id: str, _frame: Frame) -> None:
            nonlocal count
            count += 1
            if count == num_tokens:
                done.set()

        await bus.frames.subscribe(_FLOOR, on_frame)
        tune_gc()
        seen.put(0)
        await done.wait()
        seen.put(count)
        await asyncio.Event().wait()

    uvloop.run(read())


def _run_writer(port: Queue[int], num_clients: int, num_steps: int) -> None:
    """Write to every client at the worker's pace."""
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
    """Open all streams, read each to its end, and report the number of bytes."""

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
            exchange = (HANDSHAKE, socket_request(), b'"type":"done"')
        else:
            exchange = (b"", sse_request(), b"[DONE]")
        ended.put(sum(await asyncio.gather(*(one(*exchange) for _ in range(num_clients)))))

    uvloop.run(run())


# The measurements.


class _Relay:
    def __init__(self, bus: NatsBus, gateway: GatewayProcess, num_clients: int, num_steps: int):
        self._bus = bus
        self._gateway = gateway
        self._num_clients = num_clients
        self._num_steps = num_steps

    async def gateway(self, path: str, mode: str) -> Figures:
        async def streams() -> LockstepWorker:
            jobs = await take_jobs(self._bus, self._num_clients)
            return LockstepWorker(self._bus, GATEWAY_ID, [job.request_id for job in jobs])

        return await self._run("gateway", self._gateway, path, mode, streams)

    async def raw(self, path: str, mode: str) -> Figures:
        with raw_stack(self._gateway.nats_url) as stack:

            async def streams() -> LockstepWorker:
                await stack.wait_streams(self._num_clients)
                ids = [request_id(number) for number in range(self._num_clients)]
                return LockstepWorker(self._bus, REPLY, ids)

            return await self._run("raw stack", stack, path, mode, streams)

    async def _run(
        self,
        system: str,
        server: GatewayProcess | RawStack,
        path: str,
        mode: str,
        streams: Callable[[], Awaitable[LockstepWorker]],
    ) -> Figures:
        ended: Queue[int] = SPAWN.Queue()
        with spawned(_run_clients, server.port, path, self._num_clients, ended):
            worker = await streams()
            await worker.start()
            await worker.steps(_WARM_UP_STEPS, _PACE_STEPS_PER_S)
            cpu_s, start_s = server.usage.cpu_s(), time.perf_counter()
            num_steps = self._num_steps * (_COALESCED_FACTOR if mode == "coalesced" else 1)
            await worker.steps(num_steps, _PACE_STEPS_PER_S if mode == "uncoalesced" else None)
            await worker.end()
            await asyncio.to_thread(ended.get, True, _TIMEOUT_S)
            wall_s, cpu_s = time.perf_counter() - start_s, server.usage.cpu_s() - cpu_s
        num_tokens = num_steps * self._num_clients
        return _figures((system, path, mode, self._num_clients), num_tokens, wall_s, cpu_s)

    async def write_floor(self) -> Figures:
        numbers: Queue[int] = SPAWN.Queue()
        ended: Queue[int] = SPAWN.Queue()
        with spawned(_run_writer, numbers, self._num_clients, self._num_steps):
            port = await asyncio.to_thread(numbers.get, True, _TIMEOUT_S)
            with spawned(_run_clients, port, "sse", self._num_clients, ended):
                start_s = time.perf_counter()
                cpu_s = await asyncio.to_thread(numbers.get, True, _TIMEOUT_S) / 1e9
                wall_s = time.perf_counter() - start_s
                await asyncio.to_thread(ended.get, True, _TIMEOUT_S)
        num_tokens = self._num_clients * self._num_steps
        what = ("write only", "", "uncoalesced", self._num_clients)
        return _figures(what, num_tokens, wall_s, cpu_s)

    async def read_floor(self) -> Figures:
        seen: Queue[int] = SPAWN.Queue()
        num_tokens = self._num_clients * self._num_steps
        with spawned(_run_reader, self._gateway.nats_url, seen, num_tokens) as reader:
            usage = ProcessUsage(reader.pid)
            await asyncio.to_thread(seen.get, True, _TIMEOUT_S)
            ids = [f"chatcmpl-{number:024x}" for number in range(self._num_clients)]
            worker = LockstepWorker(self._bus, _FLOOR, ids)
            cpu_s, start_s = usage.cpu_s(), time.perf_counter()
            await worker.steps(self._num_steps, _PACE_STEPS_PER_S)
            await asyncio.to_thread(seen.get, True, _TIMEOUT_S)
            wall_s, cpu_s = time.perf_counter() - start_s, usage.cpu_s() - cpu_s
        what = ("receive only", "", "uncoalesced", self._num_clients)
        return _figures(what, num_tokens, wall_s, cpu_s)


def _figures(
    what: tuple[str, str, str, int], num_tokens: int, wall_s: float, cpu_s: float
) -> Figures:
    us_per_token = cpu_s / num_tokens * 1e6
    rates = num_tokens / wall_s, num_tokens / cpu_s
    return Figures(*what, num_tokens, wall_s, us_per_token, *rates)


async def _measure(num_clients: int, seconds: float) -> list[Figures]:
    with running_gateway() as gateway:
        config = NatsConfig(url=gateway.nats_url)
        bus = await nats.connect(config, "relay worker", part=Part.SCHEDULER)
        relay = _Relay(bus, gateway, num_clients, round(seconds * _PACE_STEPS_PER_S))
        try:
            results = [await relay.read_floor(), await relay.write_floor()]
            for path in ("websocket", "sse"):
                for mode in _GOALS:
                    results.append(await relay.raw(path, mode))
                    results.append(await relay.gateway(path, mode))
        finally:
            await bus.close()
    return results


def run(clients: int = 200, seconds: float = 4.0) -> PartResult:
    """Run each uncoalesced measurement for ``seconds``."""
    results = uvloop.run(_measure(clients, seconds))
    rows = [
        (
            *(run.system, run.path, run.mode, f"{run.tokens_per_s:,.0f}"),
            *(f"{run.cpu_us_per_token:.2f}", f"{run.tokens_per_core_s:,.0f}"),
            f"{_GOALS[run.mode]:,}" if run.system == "gateway" else "",
        )
        for run in results
    ]
    names = ("", "path", "mode", "tokens/s", "CPU us/token", "tokens/s per core", "goal")
    print(table(names, rows))
    return PartResult(results)
