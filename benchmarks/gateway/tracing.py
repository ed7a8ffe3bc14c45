"""Cost of tracing in a gateway, by request and token: off, sampled out, on, without a collector.

    python -m benchmarks.gateway --only tracing [--rounds 3] [--seconds 5] [--clients 32] [--smoke]

Each mode has a gateway, in turns, round after round. Clients request short answers one after the
other, then long ones. The figures are CPU time: of the gateway's event loop per request and token,
and of its other threads, one of which sends the spans. Prints the median of the rounds with the
spread, and the cost of a single span: its recording on the event loop, and its total.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import time
from collections.abc import Iterator

import msgspec
import psutil
import uvloop

from benchmarks.support.command import PartResult
from benchmarks.support.figures import table
from benchmarks.support.gateway_process import GatewayProcess, running_gateway, sse_request
from benchmarks.support.simulated_worker import simulated_worker
from millrace.runtime.tracing import Span, SpanKind
from millrace.runtime.tracing_setup import open_tracing
from millrace.schemas.config import TracingConfig
from tests.support.servers import free_port
from tests.tracing.collector import Collector

_WAYS = ("off", "sampled out", "on", "collector away")
_SHORT_TOKENS, _LONG_TOKENS = 4, 200
_TOKENS_PER_S = 100.0
_WARM_UP_S = 0.5
_NUM_SPANS = 4_000
_LAST = b"[DONE]\n\n\r\n0\r\n\r\n"


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one round of one mode."""

    way: str
    num_requests: int
    request_us: float
    threads_us: float
    token_us: float


class _DroppingCollector(Collector):
    """Collector that drops spans."""

    def take(self, body: bytes) -> None:
        self.bodies[:] = [body]


@contextlib.contextmanager
def _variables(way: str, collector: Collector) -> Iterator[None]:
    """Set the environment of a gateway for a mode."""
    endpoint = {
        "off": "",
        "collector away": f"http://127.0.0.1:{free_port()}",
    }.get(way, collector.endpoint)
    variables = {
        "MILLRACE_TRACING__ENDPOINT": endpoint,
        "MILLRACE_TRACING__SAMPLE_RATIO": "0" if way == "sampled out" else "1",
    }
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


async def _ask(port: int, max_tokens: int, until_s: float) -> int:
    """Run one client, request after request; return the number of answers."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    request = sse_request(max_tokens=max_tokens)
    num_requests = 0
    while time.perf_counter() < until_s:
        writer.write(request)
        await reader.readuntil(_LAST)
        num_requests += 1
    writer.close()
    return num_requests


async def _load(
    gateway: GatewayProcess, num_clients: int, max_tokens: int, seconds: float
) -> tuple[int, float, float]:
    """Return the number of answers, and the CPU time of the loop and of other threads."""

    async def run(for_s: float) -> int:
        until_s = time.perf_counter() + for_s
        clients = (_ask(gateway.port, max_tokens, until_s) for _ in range(num_clients))
        return sum(await asyncio.gather(*clients))

    await run(_WARM_UP_S)
    loop_s, all_s = _cpu_s(gateway.pid)
    num_requests = await run(seconds)
    loop_after_s, all_after_s = _cpu_s(gateway.pid)
    loop_s, all_s = loop_after_s - loop_s, all_after_s - all_s
    return num_requests, loop_s, all_s - loop_s


def _cpu_s(pid: int) -> tuple[float, float]:
    """Return the CPU time of a process's first thread, and of all threads."""
    process = psutil.Process(pid)
    threads = {one.id: one.user_time + one.system_time for one in process.threads()}
    return threads[pid], sum(threads.values())


def _round(way: str, collector: Collector, num_clients: int, seconds: float) -> Figures:
    with (
        _variables(way, collector),
        running_gateway() as gateway,
        simulated_worker(gateway.nats_url, _TOKENS_PER_S),
    ):
        num_short, short_s, threads_s = uvloop.run(
            _load(gateway, num_clients, _SHORT_TOKENS, seconds)
        )
        num_long, long_s, _ = uvloop.run(_load(gateway, num_clients, _LONG_TOKENS, seconds))
    return Figures(
        way=way,
        num_requests=num_short,
        request_us=short_s / max(num_short, 1) * 1e6,
        threads_us=max(threads_s, 0.0) / max(num_short, 1) * 1e6,
        token_us=long_s / max(num_long * _LONG_TOKENS, 1) * 1e6,
    )


async def _span_us(collector: Collector) -> tuple[float, float]:
    """Return the CPU time of a span: recording alone, and with sending and receiving."""
    config = TracingConfig(endpoint=collector.endpoint)
    tracing = open_tracing(config, "bench", "bench")
    assert tracing is not None
    context, _ = tracing.join(None)
    attributes = {f"gen_ai.attribute.{number}": number for number in range(12)}
    begin_s, recorded_s = time.process_time(), 0.0
    for _ in range(_NUM_SPANS):
        since_s = time.thread_time()
        tracing.tell(
            Span("work", context.anywhere(), context.span_id, 1, 2, SpanKind.SERVER, attributes)
        )
        recorded_s += time.thread_time() - since_s
    await tracing.close()
    whole_s = time.process_time() - begin_s
    return recorded_s / _NUM_SPANS * 1e6, whole_s / _NUM_SPANS * 1e6


def run(
    rounds: int = 3, seconds: float = 5.0, clients: int = 32, smoke: bool = False
) -> PartResult:
    """Run each load for ``seconds``; ``smoke`` is one short round."""
    num_rounds, seconds = (1, 0.5) if smoke else (rounds, seconds)
    with _DroppingCollector().running() as collector:
        recorded_us, whole_us = asyncio.run(_span_us(collector))
        measured = [
            _round(way, collector, clients, seconds) for _ in range(num_rounds) for way in _WAYS
        ]
    print(
        f"a span: {recorded_us:.0f} us to record, {whole_us:.0f} us including encoding and transfer"
    )
    rows = []
    for way in _WAYS:
        figures = [one for one in measured if one.way == way]
        rows.append(
            (
                way,
                _spread([one.request_us for one in figures], 0),
                _spread([one.threads_us for one in figures], 0),
                _spread([one.token_us for one in figures], 2),
                f"{sum(one.num_requests for one in figures):,}",
            )
        )
    print(table(("CPU us", "loop, a request", "threads", "loop, a token", "requests"), rows))
    return PartResult(measured)


def _spread(values: list[float], digits: int) -> str:
    low, high = min(values), max(values)
    return f"{statistics.median(values):.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"
