"""``dispatch``: latency and rate that the scheduler adds between the queue and a worker.

A real nats-server runs with one scheduler process and workers that accept everything at once.
Measured with one tenant and with many: the time from publish to a worker's receipt when there is
room, at a modest rate of random arrivals, and dispatches per second with a backlog. A tenant's
first job, for which the server makes a consumer, is timed separately. Beside them, in the same run,
is JetStream alone by bare nats-py: the time from publish to a pulling consumer at that rate, and
the rate at which one consumer pulls and acknowledges.

Dispatches per second of one core are dispatches over the scheduler's CPU time: its rate if it never
waited for the other processes, which share the machine's cores.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Coroutine

import nats as nats_py
import uvloop
from nats.js.api import ConsumerConfig, StreamConfig

from benchmarks.support.bus_client import Service
from benchmarks.support.command import PartResult
from benchmarks.support.figures import percentile
from benchmarks.support.simulated_system import MODEL, SimulatedSystem, simulated_system
from millrace.bus import nats
from millrace.bus.api import Bus
from millrace.bus.nats.permissions import Part
from millrace.bus.transport import Subscription
from millrace.schemas.control import (
    Dispatch,
    Ended,
    Served,
    WorkerCommand,
    WorkerReply,
    WorkerStatus,
)
from tests.support.waiting import eventually

_GOAL_PER_S = 2_000
_GOAL_P50_MS, _GOAL_P99_MS = 2.0, 8.0
_NUM_WORKERS = 8
_PROMPT = tuple(range(5, 133))
_MAX_TOKENS = 64
_BARE = "bare.jobs"
_PULL_JOBS = 64
_TIMEOUT_S = 300.0


class _Bare:
    """Stream and pull consumer without Millrace."""

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
        """Return the latencies from publish to receipt, with one fetch open at all times."""
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
        """Return the messages pulled and acknowledged per second."""
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
    """Dispatch rate of a backlog: per second, and per second of the scheduler's CPU time."""

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


async def _measure(requests: int, rate: float, backlog: int, tenants: int) -> bool:
    """Return whether all goals were met."""
    all_met = True
    async with simulated_system(num_schedulers=0) as system:
        url = system.config.nats.url
        bare = _Bare(url, bytes(700))
        await bare.open()
        print(
            f"from publish to receipt, with room, {rate:g} jobs/s at random times "
            f"({requests} jobs, prompts of {len(_PROMPT)} tokens)"
        )
        _print_latency(
            "JetStream alone: publish to pull",
            await bare.latencies_ms(requests, rate),
        )
        bare_rate = await bare.rate(backlog)
        await bare.close()
        sink_bus = await nats.connect(system.config.nats, "sinks", part=Part.SCHEDULER)
        sinks, service = Sinks(sink_bus, _NUM_WORKERS, num_slots=64), Service(system.bus)
        await system.start_scheduler()
        await sinks.start()
        await _latencies_ms(service, sinks, 50, rate, 1)
        _print_latency(
            f"Millrace, the first job of {tenants} tenants",
            await _latencies_ms(service, sinks, tenants, rate, tenants),
        )
        for count in (1, tenants):
            latencies_ms = await _latencies_ms(service, sinks, requests, rate, count)
            p50, p99 = _print_latency(f"Millrace, {count} tenants", latencies_ms)
            all_met = all_met and p50 <= _GOAL_P50_MS and p99 <= _GOAL_P99_MS
        print(f"  goals: p50 {_GOAL_P50_MS:g} ms, p99 {_GOAL_P99_MS:g} ms")
        print(f"dispatches, a backlog of {backlog} jobs, {_NUM_WORKERS} workers")
        print(f"  {'JetStream alone: pull and acknowledge':<44} {bare_rate:8.0f} /s")
        for count in (1, tenants):
            found = await _rate(system, service, sinks, backlog, count)
            print(
                f"  {f'Millrace, {count} tenants':<44} {found.per_s:8.0f} /s   "
                f"{found.per_core_s:.0f} /s of one core ({found.cpu_us:.0f} us each)"
            )
            all_met = all_met and found.per_core_s >= _GOAL_PER_S
        print(f"  goal: {_GOAL_PER_S} /s of one core")
        await sinks.close()
        await sink_bus.close()
    return all_met


def run(
    requests: int = 2_000,
    rate: float = 100.0,
    backlog: int = 10_000,
    tenants: int = 200,
    smoke: bool = False,
) -> PartResult:
    """Measure latency by ``requests`` at ``rate`` jobs a second, and rates by ``backlog``."""
    if smoke:
        requests, backlog, tenants = 50, 200, 10
    measuring = asyncio.wait_for(_measure(requests, rate, backlog, tenants), _TIMEOUT_S)
    return PartResult(None, uvloop.run(measuring))


_HEARTBEAT_S = 0.5
# Ends are reported together, as workers do.
_ENDED_INTERVAL_S = 0.005
_OK = WorkerReply(ok=True)
_NO = WorkerReply(ok=False, reason="bad_request", message="dispatches alone are known")


class Sinks:
    """Group of ``count`` workers with ``num_slots`` each, on one connection.

    They run from ``start`` to ``close``. ``received_s`` has each job's arrival by
    ``time.perf_counter``.
    """

    def __init__(self, bus: Bus, count: int, num_slots: int) -> None:
        self.received_s: dict[str, float] = {}
        self.num_slots = num_slots
        self._bus = bus
        self._num_held = {f"sink-{number}": 0 for number in range(count)}
        self._ended: dict[str, list[Served]] = {}
        self._subscriptions: list[Subscription] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        for worker_id in self._num_held:
            self._subscriptions.append(
                await self._bus.control.serve_commands(worker_id, self._handler(worker_id))
            )
        self._keep(self._beat())
        self._keep(self._tell_ends())

    async def set_slots(self, num_slots: int) -> None:
        """Set the slots of each worker and announce them at once."""
        self.num_slots = num_slots
        await self._announce()

    async def wait_for(self, count: int, timeout_s: float) -> None:
        """Wait until ``count`` jobs have arrived in total."""
        await eventually(lambda: len(self.received_s) >= count, timeout_s=timeout_s)

    async def close(self) -> None:
        """Retire the workers."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for subscription in self._subscriptions:
            await subscription.close()
        await self._announce(retired=True)

    def _handler(self, worker_id: str) -> Callable[[WorkerCommand], Awaitable[WorkerReply]]:
        async def handle(command: WorkerCommand) -> WorkerReply:
            if not isinstance(command, Dispatch):
                return _NO
            self.received_s[command.job.request_id] = time.perf_counter()
            self._num_held[worker_id] += 1
            self._keep(self._end(worker_id, command))
            return _OK

        return handle

    async def _end(self, worker_id: str, dispatch: Dispatch) -> None:
        await self._bus.jobs.ack(dispatch.lease)
        self._num_held[worker_id] -= 1
        job = dispatch.job
        served = Served(
            request_id=job.request_id,
            tenant=job.tenant,
            tier=job.tier,
            prompt_tokens=len(job.prompt_token_ids or ()),
            completion_tokens=job.sampling.max_tokens or 0,
        )
        self._ended.setdefault(worker_id, []).append(served)

    async def _tell_ends(self) -> None:
        while True:
            await asyncio.sleep(_ENDED_INTERVAL_S)
            ended, self._ended = self._ended, {}
            for worker_id, served in ended.items():
                await self._bus.control.publish_ended(
                    Ended(
                        worker_id=worker_id,
                        request_ids=tuple(one.request_id for one in served),
                        served=tuple(served),
                    )
                )

    async def _beat(self) -> None:
        while True:
            await self._announce()
            await asyncio.sleep(_HEARTBEAT_S)

    async def _announce(self, *, retired: bool = False) -> None:
        for worker_id, num_held in self._num_held.items():
            await self._bus.workers.announce(
                WorkerStatus(
                    worker_id=worker_id,
                    name=worker_id,
                    model=MODEL,
                    max_num_sequences=self.num_slots,
                    num_running=num_held,
                    started_ns=1,
                    sent_ns=time.time_ns(),
                    retired=retired,
                )
            )

    def _keep(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
