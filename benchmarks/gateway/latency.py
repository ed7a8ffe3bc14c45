"""Latency that the gateway adds to the first token of requests that arrive at random.

    python -m benchmarks.gateway --only latency [--rate 200] [--seconds 20] [--json FILE]

A simulated worker answers every job at once. Requests arrive at a Poisson rate, in turns of a few
seconds, either at the gateway (a streamed chat completion) or directly at NATS (a job in the queue,
its frames on a subject), so the machine's noise affects both alike. The added time is the
difference of both TTFT distributions, by quantile.

The paired figure is measured within each request. The client's process also listens on the bus, and
sees the gateway's job leave and the first token return. The gateway's time is from the client's
request to that job, plus from that token to the client's. It excludes the waits of worker and
queue.

The gateway's CPU time of a request is measured over the same turns. To compare two source trees,
run each several times in turns: on a shared core, colder caches make a request more expensive.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence

import msgspec
import nats as nats_client
import numpy as np
import uvloop
from nats.aio.msg import Msg

from benchmarks.support.command import PartResult
from benchmarks.support.figures import table
from benchmarks.support.gateway_process import GATEWAY_ID, GatewayProcess, running_gateway
from benchmarks.support.simulated_worker import MODEL, simulated_worker
from millrace.bench.arrivals import arrival_times
from millrace.bench.clients.client import LoadClient
from millrace.bench.clients.exchange import ClientExchange
from millrace.bench.health import HealthProbe, ProcessHealth
from millrace.bench.prompts import Prompted
from millrace.bench.settings import LoadSettings
from millrace.bus import nats, subjects
from millrace.bus.nats import NatsBus
from millrace.bus.nats.permissions import Part
from millrace.schemas.config import NatsConfig
from millrace.schemas.frames import Delta, Frame
from millrace.schemas.jobs import Job
from millrace.schemas.sampling import SamplingParams

_REPLY = "direct"
_TOKENS_PER_S = 50.0
_NUM_TOKENS = 4
_TURN_S = 2.5
_WARM_UP_S = 2.0
_DRAIN_S = 10.0
_MAX_P50_MS, _MAX_P99_MS = 3.0, 10.0
_MAX_CPU_MS = 1.2
_PROMPT = Prompted(text="What is a block table?", max_tokens=_NUM_TOKENS)


class Quantiles(msgspec.Struct, frozen=True, kw_only=True):
    """Quantiles in milliseconds."""

    p50: float
    p90: float
    p99: float
    max: float


class LatencyFigures(msgspec.Struct, frozen=True, kw_only=True):
    """TTFT by both ways, and the gateway's share.

    The share is the difference of quantiles, and for each request its way in, its way out, and
    both. ``gateway_cpu_ms`` is the gateway's CPU time for a request of four tokens.
    """

    rate_per_s: float
    num_requests: int
    direct: Quantiles
    gateway: Quantiles
    added: Quantiles
    paired_in: Quantiles
    paired_out: Quantiles
    paired: Quantiles
    gateway_cpu_ms: float
    client: ProcessHealth


class _Seen:
    """Bus traffic of the gateway's requests as seen by the client's process, by request id.

    The id is unknown when a request is sent; the job is matched by the prompt's ``user``.
    """

    def __init__(self) -> None:
        self.jobs_s: dict[str, float] = {}
        self.request_ids: dict[str, str] = {}
        self.tokens_s: dict[str, float] = {}

    async def on_job(self, message: Msg) -> None:
        now_s = time.perf_counter()
        job = msgspec.msgpack.decode(message.data, type=Job)
        if job.reply == GATEWAY_ID:
            self.jobs_s[job.user] = now_s
            self.request_ids[job.user] = job.request_id

    def on_frame(self, request_id: str, frame: Frame) -> None:
        if type(frame) is Delta:
            self.tokens_s.setdefault(request_id, time.perf_counter())


class _Direct:
    """Client of the bus; its frames come on a reply subject of its own."""

    def __init__(self, bus: NatsBus) -> None:
        self._bus = bus
        self._sent_s: dict[str, float] = {}
        self.ttft_ms: list[float] = []

    async def send(self, number: int) -> None:
        request_id = f"direct-{number:024x}"
        job = Job(
            request_id=request_id,
            model=MODEL,
            prompt_token_ids=(1, 2, 3, 4, 5, 6),
            sampling=SamplingParams(max_tokens=_NUM_TOKENS, seed=0),
            reply=_REPLY,
            batch_frames=True,
        )
        self._sent_s[request_id] = time.perf_counter()
        await self._bus.jobs.publish(job)

    def on_frame(self, request_id: str, frame: Frame) -> None:
        if type(frame) is Delta and (sent_s := self._sent_s.pop(request_id, None)) is not None:
            self.ttft_ms.append((time.perf_counter() - sent_s) * 1e3)


class _ThroughGateway:
    """Client of the gateway that marks each request with a user of its own."""

    def __init__(self, url: str) -> None:
        self._client = LoadClient(LoadSettings(url=url, model=MODEL))
        self.exchanges: dict[str, ClientExchange] = {}

    async def send(self, number: int) -> None:
        user = f"u{number}"
        request = self._client.encode(number, _PROMPT, user=user)
        exchange = ClientExchange(number, time.perf_counter(), asyncio.get_running_loop())
        self.exchanges[user] = exchange
        await self._client.run(request, exchange)

    def close(self) -> None:
        self._client.close()


async def _arrive(way: _Direct | _ThroughGateway, due_s: Sequence[float], first: int) -> None:
    """Send a request at each time, independent of earlier requests."""
    sending: set[asyncio.Task[None]] = set()
    for number, at_s in enumerate(due_s, first):
        await asyncio.sleep(max(0.0, at_s - time.perf_counter()))
        task = asyncio.create_task(way.send(number))
        sending.add(task)
        task.add_done_callback(sending.discard)
    async with asyncio.timeout(_DRAIN_S):
        await asyncio.gather(*sending)


async def _measure(gateway: GatewayProcess, rate_per_s: float, seconds: float) -> LatencyFigures:
    seen = _Seen()
    observer = await nats_client.connect(gateway.nats_url)
    bus = await nats.connect(
        NatsConfig(url=gateway.nats_url), "latency client", part=Part.SCHEDULER
    )
    direct, through = _Direct(bus), _ThroughGateway(gateway.url)
    probe = HealthProbe()
    try:
        await observer.subscribe(subjects.jobs_of(MODEL), cb=seen.on_job)
        await observer.flush()
        await bus.frames.subscribe(GATEWAY_ID, seen.on_frame)
        await bus.frames.subscribe(_REPLY, direct.on_frame)
        numbers = itertools.count()
        for way in (direct, through):
            await _turn(way, rate_per_s, _WARM_UP_S, next(numbers))
        direct.ttft_ms.clear()
        through.exchanges.clear()
        probe.start()
        cpu_s = gateway.usage.cpu_s()
        for _ in range(max(1, round(seconds / _TURN_S))):
            for way in (direct, through):
                await _turn(way, rate_per_s, _TURN_S, next(numbers))
        cpu_s, client = gateway.usage.cpu_s() - cpu_s, probe.stop()
    finally:
        through.close()
        await bus.close()
        await observer.close()
    return _figures(rate_per_s, direct, through, seen, cpu_s, client)


async def _turn(
    way: _Direct | _ThroughGateway, rate_per_s: float, seconds: float, number: int
) -> None:
    offsets = arrival_times(rate_per_s, 1.0, seconds, None, seed=number)
    start_s = time.perf_counter()
    await _arrive(way, [start_s + float(one) for one in offsets], number * 1_000_000)


def _figures(
    rate_per_s: float,
    direct: _Direct,
    through: _ThroughGateway,
    seen: _Seen,
    cpu_s: float,
    client: ProcessHealth,
) -> LatencyFigures:
    ttft_ms: list[float] = []
    way_in_ms: list[float] = []
    way_out_ms: list[float] = []
    for user, exchange in through.exchanges.items():
        if exchange.error or not exchange.parts_s:
            raise RuntimeError(f"a request failed: {exchange.error or 'no token'}")
        first_s = exchange.parts_s[0]
        ttft_ms.append((first_s - exchange.sent_s) * 1e3)
        way_in_ms.append((seen.jobs_s[user] - exchange.sent_s) * 1e3)
        way_out_ms.append((first_s - seen.tokens_s[seen.request_ids[user]]) * 1e3)
    by_nats, by_gateway = _quantiles(direct.ttft_ms), _quantiles(ttft_ms)
    names = Quantiles.__struct_fields__
    return LatencyFigures(
        rate_per_s=rate_per_s,
        num_requests=len(ttft_ms),
        direct=by_nats,
        gateway=by_gateway,
        added=Quantiles(**{n: getattr(by_gateway, n) - getattr(by_nats, n) for n in names}),
        paired_in=_quantiles(way_in_ms),
        paired_out=_quantiles(way_out_ms),
        paired=_quantiles([a + b for a, b in zip(way_in_ms, way_out_ms, strict=True)]),
        gateway_cpu_ms=cpu_s / len(ttft_ms) * 1e3,
        client=client,
    )


def _quantiles(values_ms: Sequence[float]) -> Quantiles:
    p50, p90, p99, largest = np.percentile(np.array(values_ms), [50, 90, 99, 100])
    return Quantiles(p50=float(p50), p90=float(p90), p99=float(p99), max=float(largest))


def run(rate: float = 200.0, seconds: float = 20.0) -> PartResult:
    """Measure each way for ``seconds``; goals are of the paired figure and of CPU time."""
    with running_gateway() as gateway, simulated_worker(gateway.nats_url, _TOKENS_PER_S):
        figures = uvloop.run(_measure(gateway, rate, seconds))
    rows = {
        "straight over NATS": figures.direct,
        "through the gateway": figures.gateway,
        "added, by quantile": figures.added,
        "paired: in": figures.paired_in,
        "paired: out": figures.paired_out,
        "paired: both": figures.paired,
    }
    print(f"first token at {figures.rate_per_s:g} requests/s, {figures.num_requests:,} each way")
    names = Quantiles.__struct_fields__
    cells = [(title, *(f"{getattr(of, n):.2f}" for n in names)) for title, of in rows.items()]
    print(table(("milliseconds", *names), cells))
    print(f"CPU time of the gateway: {figures.gateway_cpu_ms:.2f} ms a request")
    print(
        f"goals: added p50 at most {_MAX_P50_MS:g} ms, p99 at most {_MAX_P99_MS:g} ms, CPU time at "
        f"most {_MAX_CPU_MS:g} ms; the client used {figures.client.cpu_share:.0%} of a core and "
        f"was late by p99 {figures.client.lag_p99_ms:.1f} ms"
    )
    is_quick = figures.paired.p50 <= _MAX_P50_MS and figures.paired.p99 <= _MAX_P99_MS
    return PartResult(figures, is_quick and figures.gateway_cpu_ms <= _MAX_CPU_MS)
