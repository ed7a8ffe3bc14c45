"""Many WebSockets on one gateway process: what each costs, and how late its tokens are.

    python -m benchmarks.gateway_sockets [--sockets 10000] [--seconds 20] [--json FILE]

Clients in processes of their own open all sockets, which then stay idle: the growth of the
gateway's resident memory over their number is what a connection costs. Then each asks for a
generation that a simulated worker answers with 2 tokens/s. The text of a token is the time at which
the worker sent it, so its latency is from the worker's publish to the arrival in the client's
process, on the one monotonic clock of the machine. Beside it stands the raw stack: the same
libraries with a bare handler between them (``benchmarks.support.raw_stack``).
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import uvloop

from benchmarks.gateway_sockets.clients import MAX_TOKENS, ClientProcesses
from benchmarks.support.command import command_parser, write_json
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
    arguments: argparse.Namespace,
    on_asked: Callable[[], object] = lambda: None,
) -> SocketFigures:
    num_sockets, seconds, usage = arguments.sockets, arguments.seconds, server.usage
    clients = ClientProcesses(server.port, num_sockets, arguments.processes)
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


async def _run(arguments: argparse.Namespace) -> list[SocketFigures]:
    results = []
    with running_gateway(max_sockets_per_address=0) as gateway:
        bus = await nats.connect(
            NatsConfig(url=gateway.nats_url), "simulated worker", part=Part.SCHEDULER
        )
        worker = SimulatedWorker(bus, _TOKENS_PER_S)
        ready = asyncio.Event()
        working = asyncio.create_task(worker.run(ready.set))
        await ready.wait()
        results.append(await _measure("gateway", gateway, arguments))
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        if not arguments.no_raw:
            with raw_stack(gateway.nats_url) as stack:
                results.append(await _measure_raw(bus, stack, arguments))
        await bus.close()
    return results


async def _measure_raw(
    bus: NatsBus, stack: RawStack, arguments: argparse.Namespace
) -> SocketFigures:
    """The same with jobs that are in no queue."""
    tasks: list[asyncio.Task[None]] = []

    async def feed() -> None:
        await stack.wait_streams(arguments.sockets)
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
                for number in range(arguments.sockets)
            ]
        )
        await worker.run(lambda: None)

    def on_asked() -> None:
        tasks.append(asyncio.create_task(feed()))

    try:
        return await _measure("raw stack", stack, arguments, on_asked)
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if the gateway kept its goals."""
    parser = command_parser("gateway_sockets", __doc__)
    parser.add_argument("--sockets", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=20.0, help="that are measured")
    parser.add_argument("--processes", type=int, default=2, help="of clients")
    parser.add_argument("--no-raw", action="store_true", help="the gateway alone")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    parsed = parser.parse_args(arguments)
    most = allow_many_files() - _SPARE_FILES
    if parsed.sockets > most:
        parser.error(f"a process may open {most} sockets here (ulimit -Hn); ask for fewer")
    results = uvloop.run(_run(parsed))
    print(
        f"{'':<11}{'sockets':>8}{'KB/idle':>9}{'tokens/s':>10}{'p50 ms':>9}{'p99 ms':>9}"
        f"{'max ms':>9}{'missing':>9}{'CPU':>7}  clients' CPU, loop late p99"
    )
    for run in results:
        clients = "; ".join(f"{c.cpu_share:.0%}, {c.lag_p99_ms:.1f} ms" for c in run.clients)
        print(
            f"{run.system:<11}{run.num_sockets:>8,}{run.idle_bytes / 1024:>9.1f}"
            f"{run.tokens_per_s:>10,.0f}{run.latency_p50_ms:>9.2f}{run.latency_p99_ms:>9.2f}"
            f"{run.latency_max_ms:>9.1f}{run.missing_share:>9.2%}{run.cpu_share:>7.0%}  {clients}"
        )
    print(
        f"goals of the gateway: p99 at most {_MAX_LATENCY_MS:g} ms, "
        f"{_MAX_IDLE_BYTES / 1024:g} KB an idle connection"
    )
    write_json(parsed.json, results)
    gateway = results[0]
    kept = gateway.latency_p99_ms <= _MAX_LATENCY_MS and gateway.idle_bytes <= _MAX_IDLE_BYTES
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
