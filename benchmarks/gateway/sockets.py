"""Cost and token latency of many WebSockets on one gateway process.

    python -m benchmarks.gateway --only sockets [--sockets 10000] [--seconds 20] [--json FILE]

Client processes open all sockets, which then stay idle. The cost of a connection is the growth of
the gateway's resident memory over their number. Then each socket requests a generation, which a
simulated worker answers with 2 tokens/s. A token's text is its sending time at the worker. Its
latency lasts until its arrival in the client's process, on the machine's monotonic clock. Beside it
is the raw stack: the same libraries with a bare handler (``benchmarks.support.raw_stack``).
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from array import array
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import cast

import msgspec
import numpy as np
import uvloop

from benchmarks.support.command import PartResult
from benchmarks.support.figures import table
from benchmarks.support.gateway_process import (
    HANDSHAKE,
    GatewayProcess,
    running_gateway,
    socket_request,
)
from benchmarks.support.processes import SPAWN
from benchmarks.support.raw_stack import REPLY, RawStack, raw_stack, request_id
from benchmarks.support.simulated_worker import MODEL, SimulatedWorker
from millrace.bench.clients.socket_client import frame
from millrace.bench.health import HealthProbe, ProcessHealth
from millrace.bench.load import allow_many_files
from millrace.bus import nats
from millrace.bus.nats import NatsBus
from millrace.bus.nats.permissions import Part
from millrace.schemas.config import NatsConfig
from millrace.schemas.jobs import Job
from millrace.schemas.sampling import SamplingParams
from tests.support.waiting import eventually

MAX_TOKENS = 2_000
_CONNECTS_AT_ONCE = 64
_NUM_PROCESSES = 2
_ASKS_PER_S = 1_000.0
_TIMEOUT_S = 90.0
_FIRST_TOKENS_S = 60.0
_PING, _PONG = 0x89, 0xA
_STAMP = re.compile(rb" (\d{19})")


class _Socket(asyncio.Protocol):
    """Protocol that reads time stamps out of any data and answers pings."""

    def __init__(self, clients: _Clients) -> None:
        self._clients = clients
        self._rest = b""
        self._has_token = False
        self.transport: asyncio.Transport | None = None
        self.opened = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.write(HANDSHAKE)

    def connection_lost(self, _exc: Exception | None) -> None:
        self._clients.num_lost += 1

    def data_received(self, data: bytes) -> None:
        now_ns = time.perf_counter_ns()
        if not self.opened.done():
            if b" 101 " in data:
                self.opened.set_result(None)
            else:
                self.opened.set_exception(ConnectionError(f"refused: {data[:200]!r}"))
            return
        data = self._whole_frames(self._rest + data)
        stamps = _STAMP.findall(data)
        if stamps:
            self._clients.take(now_ns, stamps, is_first=not self._has_token)
            self._has_token = True
        elif b'"type":"error"' in data:
            self._clients.errors.append(data)

    def _whole_frames(self, data: bytes) -> bytes:
        """Return the whole frames of ``data``, and answer the pings among them."""
        position, size = 0, len(data)
        while size - position >= 2:
            length, start = data[position + 1], position + 2
            if length >= 126:
                wide = 2 if length == 126 else 8
                length = int.from_bytes(data[start : start + wide], "big")
                start += wide
            if start + length > size:
                break
            if data[position] == _PING and self.transport is not None:
                self.transport.write(frame(_PONG, data[start : start + length]))
            position = start + length
        self._rest = data[position:]
        return data[:position]


class _Clients:
    def __init__(self, port: int, num_sockets: int, pipe: Connection) -> None:
        self._port = port
        self._num_sockets = num_sockets
        self._pipe = pipe
        self._sockets: list[_Socket] = []
        self._latencies_ms = array("f")
        self._measures = False
        self.errors: list[bytes] = []
        self.num_started = 0
        self.num_lost = 0

    def take(self, now_ns: int, stamps: list[bytes], *, is_first: bool) -> None:
        self.num_started += is_first
        if self._measures:
            self._latencies_ms.extend((now_ns - int(stamp)) / 1e6 for stamp in stamps)

    async def run(self) -> None:
        """Run the steps; a message of the parent starts each, a message to it ends it."""
        places = asyncio.Semaphore(_CONNECTS_AT_ONCE)
        await self._next_message()
        await asyncio.gather(*(self._connect(places) for _ in range(self._num_sockets)))
        self._pipe.send(len(self._sockets))
        await self._next_message()
        await self._ask_all()
        self._pipe.send(self.num_started)
        seconds = await self._next_message()
        probe = HealthProbe()
        probe.start()
        self._measures = True
        await asyncio.sleep(seconds)
        self._measures = False
        self._pipe.send((self._latencies_ms.tobytes(), probe.stop(), self.num_lost))
        await self._next_message()

    async def _connect(self, places: asyncio.Semaphore) -> None:
        async with places:
            made = await asyncio.get_running_loop().create_connection(
                lambda: _Socket(self), "127.0.0.1", self._port
            )
            await made[1].opened
            self._sockets.append(made[1])

    async def _ask_all(self) -> None:
        """Send requests at a steady pace; return when each has its first token."""
        request = socket_request(max_tokens=MAX_TOKENS)
        start_s = time.perf_counter()
        for number, one in enumerate(self._sockets):
            late_s = time.perf_counter() - start_s - number / _ASKS_PER_S
            if late_s < 0:
                await asyncio.sleep(-late_s)
            assert one.transport is not None
            one.transport.write(request)
        await eventually(
            lambda: self.num_started == self._num_sockets or bool(self.errors),
            _FIRST_TOKENS_S,
            f"a first token on each of {self._num_sockets} sockets",
        )
        if self.errors:
            raise ConnectionError(f"{len(self.errors)} errors, the first: {self.errors[0]!r}")

    async def _next_message(self) -> float:
        """Wait for the parent's next message."""
        message: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._pipe.fileno(), lambda: message.set_result(self._pipe.recv()))
        try:
            return await message
        finally:
            loop.remove_reader(self._pipe.fileno())
            # The event loop made the pipe non-blocking, but a message may exceed its buffer.
            os.set_blocking(self._pipe.fileno(), True)


def _run_clients(port: int, num_sockets: int, pipe: Connection) -> None:
    allow_many_files()
    uvloop.run(_Clients(port, num_sockets, pipe).run())


class ClientProcesses:
    """Client processes; ``stop`` ends them."""

    def __init__(self, port: int, num_sockets: int) -> None:
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        for rank in range(_NUM_PROCESSES):
            ours, theirs = SPAWN.Pipe()
            share = num_sockets // _NUM_PROCESSES + (rank < num_sockets % _NUM_PROCESSES)
            process = SPAWN.Process(target=_run_clients, args=(port, share, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    async def step(self, message: float) -> list[object]:
        """Send ``message`` to all processes and return their answers.

        Raises EOFError if a process has died.
        """
        for pipe in self._pipes:
            pipe.send(message)
        return [await asyncio.to_thread(self._answer, pipe) for pipe in self._pipes]

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def _answer(self, pipe: Connection) -> object:
        if not pipe.poll(_TIMEOUT_S):
            raise TimeoutError("a client process does not answer")
        return pipe.recv()


_TOKENS_PER_S = 2.0
_SETTLE_S = 3.0
_MAX_LATENCY_MS = 50.0
_MAX_IDLE_BYTES = 30 * 1024
# Files of the gateway, or of a client process, that are not sockets of clients.
_SPARE_FILES = 256


class SocketFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one system.

    ``missing_share`` is the share of tokens due in the measured time that did not arrive in it.
    """

    system: str
    num_sockets: int
    idle_bytes: float
    latency_p50_ms: float
    latency_p99_ms: float
    latency_max_ms: float
    tokens_per_s: float
    missing_share: float
    cpu_share: float
    clients: tuple[ProcessHealth, ...]


async def _measure(
    name: str,
    server: GatewayProcess | RawStack,
    num_sockets: int,
    seconds: float,
    on_asked: Callable[[], object] = lambda: None,
) -> SocketFigures:
    usage = server.usage
    clients = ClientProcesses(server.port, num_sockets)
    try:
        before_bytes = usage.rss_bytes()
        await clients.step(0.0)
        await asyncio.sleep(_SETTLE_S)
        idle_bytes = (usage.rss_bytes() - before_bytes) / num_sockets
        asking = asyncio.create_task(clients.step(0.0))
        on_asked()
        await asking
        await asyncio.sleep(_SETTLE_S)
        cpu_s, start_s = usage.cpu_s(), time.perf_counter()
        answers = await clients.step(seconds)
        cpu_s, wall_s = usage.cpu_s() - cpu_s, time.perf_counter() - start_s
    finally:
        clients.stop()
    reports = cast("list[tuple[bytes, ProcessHealth, int]]", answers)
    if lost := sum(one[2] for one in reports):
        raise ConnectionError(f"{name}: {lost} sockets were closed")
    latencies = np.concatenate([np.frombuffer(one[0], dtype=np.float32) for one in reports])
    due = num_sockets * _TOKENS_PER_S * seconds
    p50, p99 = np.percentile(latencies, [50, 99])
    return SocketFigures(
        system=name,
        num_sockets=num_sockets,
        idle_bytes=idle_bytes,
        latency_p50_ms=float(p50),
        latency_p99_ms=float(p99),
        latency_max_ms=float(latencies.max()),
        tokens_per_s=len(latencies) / seconds,
        missing_share=max(0.0, 1 - len(latencies) / due),
        cpu_share=cpu_s / wall_s,
        clients=tuple(one[1] for one in reports),
    )


async def _run(sockets: int, seconds: float) -> list[SocketFigures]:
    results = []
    with running_gateway(max_sockets_per_address=0) as gateway:
        bus = await nats.connect(
            NatsConfig(url=gateway.nats_url), "simulated worker", part=Part.SCHEDULER
        )
        worker = SimulatedWorker(bus, _TOKENS_PER_S)
        ready = asyncio.Event()
        working = asyncio.create_task(worker.run(ready.set))
        await ready.wait()
        results.append(await _measure("gateway", gateway, sockets, seconds))
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        with raw_stack(gateway.nats_url) as stack:
            results.append(await _measure_raw(bus, stack, sockets, seconds))
        await bus.close()
    return results


async def _measure_raw(
    bus: NatsBus, stack: RawStack, sockets: int, seconds: float
) -> SocketFigures:
    """Measure the raw stack, with jobs that are in no queue."""
    tasks: list[asyncio.Task[None]] = []

    async def feed() -> None:
        await stack.wait_streams(sockets)
        worker = SimulatedWorker(bus, _TOKENS_PER_S)
        sampling = SamplingParams(max_tokens=MAX_TOKENS)
        await worker.adopt(
            [
                Job(
                    request_id=request_id(number),
                    model=MODEL,
                    prompt_token_ids=(1,),
                    sampling=sampling,
                    reply=REPLY,
                )
                for number in range(sockets)
            ]
        )
        await worker.run(lambda: None)

    def on_asked() -> None:
        tasks.append(asyncio.create_task(feed()))

    try:
        return await _measure("raw stack", stack, sockets, seconds, on_asked)
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def run(sockets: int = 10_000, seconds: float = 20.0) -> PartResult:
    """Measure ``sockets`` for ``seconds``."""
    most = allow_many_files() - _SPARE_FILES
    if sockets > most:
        sys.exit(f"a process may open {most} sockets here (ulimit -Hn); ask for fewer")
    results = uvloop.run(_run(sockets, seconds))
    rows = [
        (
            *(run.system, f"{run.num_sockets:,}", f"{run.idle_bytes / 1024:.1f}"),
            *(f"{run.tokens_per_s:,.0f}", f"{run.latency_p50_ms:.2f}", f"{run.latency_p99_ms:.2f}"),
            *(f"{run.latency_max_ms:.1f}", f"{run.missing_share:.2%}", f"{run.cpu_share:.0%}"),
            "; ".join(f"{c.cpu_share:.0%}, {c.lag_p99_ms:.1f} ms" for c in run.clients),
        )
        for run in results
    ]
    names = ("", "sockets", "KB/idle", "tokens/s", "p50 ms", "p99 ms", "max ms", "missing", "CPU")
    print(table((*names, "clients' CPU, loop late p99"), rows))
    print(
        f"goals of the gateway: p99 at most {_MAX_LATENCY_MS:g} ms, "
        f"{_MAX_IDLE_BYTES / 1024:g} KB an idle connection"
    )
    gateway = results[0]
    kept = gateway.latency_p99_ms <= _MAX_LATENCY_MS and gateway.idle_bytes <= _MAX_IDLE_BYTES
    return PartResult(results, kept)
