"""``python -m benchmarks.dispatch``: what the scheduler adds between the queue and a worker.

On a real nats-server with one scheduler process and workers that take everything at once: the time
from publish to a worker's receipt when there is room, at a modest rate of random arrivals, and
dispatches per second while there is a backlog, each with one tenant and with many; the first job of
a tenant, for which the server makes a consumer, is timed for itself. Beside them, in
the same run, what JetStream alone needs from publish to a pulling consumer at that rate, and how
fast one consumer pulls and acknowledges, by bare nats-py.

Dispatches per second of one core are those that the scheduler would make if it never waited for
the others, who need the machine's cores as well: dispatches over its processor time.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Awaitable, Callable

import nats as nats_py
import uvloop
from nats.js.api import ConsumerConfig, StreamConfig

from benchmarks.dispatch.sinks import Sinks
from benchmarks.support.bus_client import Service
from benchmarks.support.command import command_parser
from benchmarks.support.figures import percentile
from benchmarks.support.simulated_system import SimulatedSystem, simulated_system
from millrace.bus import nats
from millrace.bus.nats.permissions import Part

_GOAL_PER_S = 2_000
_GOAL_P50_MS, _GOAL_P99_MS = 2.0, 8.0
_NUM_WORKERS = 8
_PROMPT = tuple(range(5, 133))
_MAX_TOKENS = 64
_BARE = "bare.jobs"
_PULL_JOBS = 64
_TIMEOUT_S = 300.0


class _Bare:
    """A stream and a pull consumer of its own, without anything of Millrace."""

    def __init__(self, url: str, payload: bytes) -> None:
        self._url = url
        self._payload = payload

    async def open(self) -> None:
        self._publisher = await nats_py.connect(self._url)
        self._consumer = await nats_py.connect(self._url)
        stream = StreamConfig(name="BARE", subjects=[_BARE])
        await self._publisher.jetstream().add_stream(stream)
        self._pull = await self._consumer.jetstream().pull_subscribe(
            _BARE, durable="bare", config=ConsumerConfig(max_ack_pending=100_000)
        )

    async def close(self) -> None:
        await self._publisher.close()
        await self._consumer.close()

    async def latencies_ms(self, count: int, rate: float) -> list[float]:
        """From publish to receipt, one fetch open at all times."""
        stream = self._publisher.jetstream()
        sent_s: dict[int, float] = {}
        latencies: list[float] = []

        async def receive() -> None:
            while len(latencies) < count:
                for message in await self._pull.fetch(1, timeout=10.0):
                    number = int(message.data[: message.data.index(b" ")])
                    latencies.append((time.perf_counter() - sent_s[number]) * 1e3)
                    await message.ack()

        async def send(number: int) -> None:
            sent_s[number] = time.perf_counter()
            await stream.publish(_BARE, b"%d " % number + self._payload)

        receiving = asyncio.create_task(receive())
        await _at_random(count, rate, send)
        await receiving
        return latencies

    async def rate(self, count: int) -> float:
        """Pulled and acknowledged a second."""
        stream = self._publisher.jetstream()
        for start in range(0, count, _PULL_JOBS):
            batch = range(start, min(start + _PULL_JOBS, count))
            await asyncio.gather(*(stream.publish(_BARE, self._payload) for _ in batch))
        begun_s, left = time.perf_counter(), count
        while left:
            messages = await self._pull.fetch(_PULL_JOBS, timeout=5.0)
            await asyncio.gather(*(message.ack_sync() for message in messages))
            left -= len(messages)
        return count / (time.perf_counter() - begun_s)


async def _at_random(count: int, rate: float, send: Callable[[int], Awaitable[object]]) -> None:
    """Send 0 … count - 1 at the times of a Poisson process."""
    chance = random.Random(1)
    due_s = time.perf_counter()
    sending: list[asyncio.Future[object]] = []
    for number in range(count):
        due_s += chance.expovariate(rate)
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        sending.append(asyncio.ensure_future(send(number)))
    await asyncio.gather(*sending)


async def _latencies_ms(
    service: Service, sinks: Sinks, count: int, rate: float, num_tenants: int
) -> list[float]:
    known = set(service.answers)

    async def send(number: int) -> None:
        await service.send(f"tenant-{number % num_tenants}", _PROMPT, _MAX_TOKENS)

    before = len(sinks.received_s)
    await _at_random(count, rate, send)
    await sinks.wait_for(before + count, _TIMEOUT_S)
    return [
        (sinks.received_s[request_id] - answer.sent_s) * 1e3
        for request_id, answer in service.answers.items()
        if request_id not in known
    ]


class _Rate:
    """Dispatches of a backlog: a second, and a second of the scheduler's processor time."""

    def __init__(self, count: int, took_s: float, cpu_s: float) -> None:
        self.per_s = count / took_s
        self.per_core_s = count / cpu_s
        self.cpu_us = cpu_s / count * 1e6


async def _rate(
    system: SimulatedSystem, service: Service, sinks: Sinks, count: int, num_tenants: int
) -> _Rate:
    before = len(sinks.received_s)
    await sinks.set_slots(0)
    backlogs = [f"tenant-{number % num_tenants}" for number in range(count)]
    for start in range(0, count, _PULL_JOBS):
        tenants = backlogs[start : start + _PULL_JOBS]
        await asyncio.gather(*(service.send(tenant, _PROMPT, _MAX_TOKENS) for tenant in tenants))
    cpu_s, begun_s = system.scheduler_cpu_s(), time.perf_counter()
    await sinks.set_slots(64)
    await sinks.wait_for(before + count, _TIMEOUT_S)
    took_s = max(sinks.received_s.values()) - begun_s
    return _Rate(count, took_s, system.scheduler_cpu_s() - cpu_s)


def _print_latency(what: str, latencies_ms: list[float]) -> tuple[float, float]:
    p50, p99 = percentile(latencies_ms, 0.5), percentile(latencies_ms, 0.99)
    print(f"  {what:<44} p50 {p50:6.2f} ms   p99 {p99:6.2f} ms")
    return p50, p99


async def _measure(arguments: argparse.Namespace) -> bool:
    """Whether all goals were kept."""
    kept = True
    async with simulated_system() as system:
        url = system.config.nats.url
        bare = _Bare(url, bytes(700))
        await bare.open()
        print(
            f"from publish to receipt, with room, {arguments.rate:g} jobs/s at random times "
            f"({arguments.requests} jobs, prompts of {len(_PROMPT)} tokens)"
        )
        _print_latency(
            "JetStream alone: publish to pull",
            await bare.latencies_ms(arguments.requests, arguments.rate),
        )
        bare_rate = await bare.rate(arguments.backlog)
        await bare.close()
        sink_bus = await nats.connect(system.config.nats, "sinks", part=Part.SCHEDULER)
        sinks, service = Sinks(sink_bus, _NUM_WORKERS, num_slots=64), Service(system.bus)
        await system.start_scheduler()
        await sinks.start()
        await _latencies_ms(service, sinks, 50, arguments.rate, 1)
        _print_latency(
            f"Millrace, the first job of {arguments.tenants} tenants",
            await _latencies_ms(
                service, sinks, arguments.tenants, arguments.rate, arguments.tenants
            ),
        )
        for tenants in (1, arguments.tenants):
            latencies_ms = await _latencies_ms(
                service, sinks, arguments.requests, arguments.rate, tenants
            )
            p50, p99 = _print_latency(f"Millrace, {tenants} tenants", latencies_ms)
            kept = kept and p50 <= _GOAL_P50_MS and p99 <= _GOAL_P99_MS
        print(f"  goals: p50 {_GOAL_P50_MS:g} ms, p99 {_GOAL_P99_MS:g} ms")
        print(f"dispatches, a backlog of {arguments.backlog} jobs, {_NUM_WORKERS} workers")
        print(f"  {'JetStream alone: pull and acknowledge':<44} {bare_rate:8.0f} /s")
        for tenants in (1, arguments.tenants):
            rate = await _rate(system, service, sinks, arguments.backlog, tenants)
            print(
                f"  {f'Millrace, {tenants} tenants':<44} {rate.per_s:8.0f} /s   "
                f"{rate.per_core_s:.0f} /s of one core ({rate.cpu_us:.0f} us each)"
            )
            kept = kept and rate.per_core_s >= _GOAL_PER_S
        print(f"  goal: {_GOAL_PER_S} /s of one core")
        await sinks.close()
        await sink_bus.close()
    return kept


def main() -> int:
    """1 if a goal was missed; a smoke run has none."""
    parser = command_parser("dispatch", __doc__)
    parser.add_argument("--requests", type=int, default=2_000, help="for the latency")
    parser.add_argument("--rate", type=float, default=100.0, help="jobs a second, for the latency")
    parser.add_argument("--backlog", type=int, default=10_000, help="for the dispatches")
    parser.add_argument("--tenants", type=int, default=200)
    parser.add_argument("--smoke", action="store_true", help="a few seconds; measures nothing")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.requests, arguments.backlog, arguments.tenants = 50, 200, 10
    kept = uvloop.run(asyncio.wait_for(_measure(arguments), _TIMEOUT_S))
    return 0 if kept or arguments.smoke else 1


if __name__ == "__main__":
    raise SystemExit(main())
