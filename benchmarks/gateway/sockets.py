"""Many WebSockets on one gateway process: what each costs, and how late its tokens are.

    python -m benchmarks.gateway --only sockets [--sockets 10000] [--seconds 20] [--json FILE]

Clients in processes of their own open all sockets, which then stay idle: the growth of the
gateway's resident memory over their number is what a connection costs. Then each asks for a
generation that a simulated worker answers with 2 tokens/s. The text of a token is the time at which
the worker sent it, so its latency is from the worker's publish to the arrival in the client's
process, on the one monotonic clock of the machine. Beside it stands the raw stack: the same
libraries with a bare handler between them (``benchmarks.support.raw_stack``).
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from typing import NamedTuple, cast

import msgspec
import numpy as np
import uvloop

from benchmarks.gateway.socket_clients import MAX_TOKENS, ClientProcesses
from benchmarks.support.command import Told
from benchmarks.support.figures import table
from benchmarks.support.gateway_process import GatewayProcess, running_gateway
from benchmarks.support.raw_stack import REPLY, RawStack, raw_stack, request_id
from benchmarks.support.simulated_worker import MODEL, SimulatedWorker
from millrace.bench.files import allow_many_files
from millrace.bench.health import ProcessHealth
from millrace.bus import nats
from millrace.bus.nats import NatsBus
from millrace.bus.nats.permissions import Part
from millrace.schemas.config import NatsConfig
from millrace.schemas.jobs import Job
from millrace.schemas.sampling import SamplingParams

_TOKENS_PER_S = 2.0
_SETTLE_S = 3.0
_MAX_LATENCY_MS = 50.0
_MAX_IDLE_BYTES = 30 * 1024
# Files of the gateway that are not sockets of clients, and the same of a client process.
_SPARE_FILES = 256


class Load(NamedTuple):
    """So many sockets for so many measured seconds, of clients in so many processes."""

    sockets: int
    seconds: float
    processes: int


class SocketFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One system. ``missing_share`` are tokens that were due in the measured time and did not
    arrive in it."""

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
    load: Load,
    on_asked: Callable[[], object] = lambda: None,
) -> SocketFigures:
    (num_sockets, seconds, processes), usage = load, server.usage
    clients = ClientProcesses(server.port, num_sockets, processes)
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
    told = cast("list[tuple[bytes, ProcessHealth, int]]", answers)
    if lost := sum(one[2] for one in told):
        raise ConnectionError(f"{name}: {lost} sockets were closed")
    latencies = np.concatenate([np.frombuffer(one[0], dtype=np.float32) for one in told])
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
        clients=tuple(one[1] for one in told),
    )


async def _run(load: Load, no_raw: bool) -> list[SocketFigures]:
    results = []
    with running_gateway(max_sockets_per_address=0) as gateway:
        bus = await nats.connect(
            NatsConfig(url=gateway.nats_url), "simulated worker", part=Part.SCHEDULER
        )
        worker = SimulatedWorker(bus, _TOKENS_PER_S)
        ready = asyncio.Event()
        working = asyncio.create_task(worker.run(ready.set))
        await ready.wait()
        results.append(await _measure("gateway", gateway, load))
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        if not no_raw:
            with raw_stack(gateway.nats_url) as stack:
                results.append(await _measure_raw(bus, stack, load))
        await bus.close()
    return results


async def _measure_raw(bus: NatsBus, stack: RawStack, load: Load) -> SocketFigures:
    """The same with jobs that are in no queue."""
    tasks: list[asyncio.Task[None]] = []

    async def feed() -> None:
        await stack.wait_streams(load.sockets)
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
                for number in range(load.sockets)
            ]
        )
        await worker.run(lambda: None)

    def on_asked() -> None:
        tasks.append(asyncio.create_task(feed()))

    try:
        return await _measure("raw stack", stack, load, on_asked)
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def run(
    sockets: int = 10_000, seconds: float = 20.0, processes: int = 2, no_raw: bool = False
) -> Told:
    """``seconds`` are measured; ``no_raw`` measures the gateway alone."""
    most = allow_many_files() - _SPARE_FILES
    if sockets > most:
        sys.exit(f"a process may open {most} sockets here (ulimit -Hn); ask for fewer")
    results = uvloop.run(_run(Load(sockets, seconds, processes), no_raw))
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
    return Told(results, kept)
