"""``python -m benchmarks.dispatch``: what the scheduler adds between the queue and a worker.

On a real nats-server with one scheduler process and a scripted worker: the time from publish to
the worker's receipt when there is room, and dispatches per second when there is a backlog. Beside
them, in the same run, what JetStream alone needs from publish to a pulling consumer, and how fast
one consumer pulls and acknowledges.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import uvloop

from bus import nats
from bus.api import Bus
from schemas.config import NatsConfig
from schemas.control import Dispatch, Ended, WorkerCommand, WorkerReply, WorkerStatus
from schemas.jobs import Job
from schemas.sampling import SamplingParams
from tests.support.servers import NatsServer, die_with_parent

_MODEL = "demo"
_PROMPT = tuple(range(5, 133))
_HEARTBEAT_S = 0.5
_TIMEOUT_S = 300.0


def _job(request_id: str, model: str = _MODEL) -> Job:
    return Job(
        request_id=request_id,
        model=model,
        prompt_token_ids=_PROMPT,
        sampling=SamplingParams(max_tokens=64, seed=1),
        received_ns=time.time_ns(),
    )


class _Sink:
    """A worker that takes everything at once and acknowledges it in the background."""

    def __init__(self, bus: Bus, num_slots: int) -> None:
        self.bus = bus
        self.worker_id = "sink-1"
        self.num_slots = num_slots
        self.received_s: dict[str, float] = {}
        self.arrived = asyncio.Event()
        self._held: dict[str, str] = {}
        self._acking: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        await self.bus.control.serve_commands(self.worker_id, self._on_command)
        self._acking.add(asyncio.create_task(self._beat()))

    async def _beat(self) -> None:
        while True:
            await self.bus.workers.announce(
                WorkerStatus(
                    worker_id=self.worker_id,
                    name="sink",
                    model=_MODEL,
                    max_num_sequences=self.num_slots,
                    num_running=len(self._held),
                    started_ns=1,
                    sent_ns=time.time_ns(),
                )
            )
            await asyncio.sleep(_HEARTBEAT_S)

    async def _on_command(self, command: WorkerCommand) -> WorkerReply:
        if not isinstance(command, Dispatch):
            return WorkerReply(ok=False, reason="bad_request")
        request_id = command.job.request_id
        self.received_s[request_id] = time.perf_counter()
        self.arrived.set()
        self._held[request_id] = command.lease
        task = asyncio.create_task(self._end(request_id, command.lease))
        self._acking.add(task)
        task.add_done_callback(self._acking.discard)
        return WorkerReply(ok=True)

    async def _end(self, request_id: str, lease: str) -> None:
        await self.bus.jobs.ack(lease)
        del self._held[request_id]
        await self.bus.control.publish_ended(
            Ended(worker_id=self.worker_id, request_ids=(request_id,))
        )

    async def wait_for(self, count: int) -> None:
        while len(self.received_s) < count:
            self.arrived.clear()
            await self.arrived.wait()

    async def close(self) -> None:
        for task in self._acking:
            task.cancel()
        await asyncio.gather(*self._acking, return_exceptions=True)


@contextlib.asynccontextmanager
async def _scheduler_process(url: str) -> AsyncIterator[None]:
    environment = {
        **os.environ,
        "MILLRACE_NATS__URL": url,
        "MILLRACE_REDIS__URL": "redis://127.0.0.1:1/0",
        "MILLRACE_SCHEDULER__MODELS": _MODEL,
        "MILLRACE_SCHEDULER__MAX_QUEUED_JOBS": "1000000",
        "MILLRACE_LOG_LEVEL": "error",
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "scheduler", env=environment, preexec_fn=die_with_parent
    )
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.wait(), 5.0)


def _print_latency(what: str, latencies_ms: list[float]) -> None:
    ordered = sorted(latencies_ms)
    p99 = ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
    print(f"  {what:<44} p50 {statistics.median(ordered):6.2f} ms   p99 {p99:6.2f} ms")


async def _measure(url: str, num_requests: int, num_backlog: int) -> None:
    config = NatsConfig(url=url)
    publisher, worker_bus = await nats.connect(config, "bench"), await nats.connect(config, "sink")
    print(f"latency, one request at a time ({num_requests} requests, 128-token prompts)")
    _print_latency(
        "JetStream alone: publish to pull", await _bare_latency(publisher, worker_bus, num_requests)
    )
    rate = await _bare_rate(publisher, worker_bus, num_backlog)
    sink = _Sink(worker_bus, num_slots=64)
    await sink.start()
    async with _scheduler_process(url):
        await publisher.jobs.publish(_job("warm"))
        await sink.wait_for(1)
        latencies: list[float] = []
        for number in range(num_requests):
            request_id = f"one-{number}"
            started_s = time.perf_counter()
            await publisher.jobs.publish(_job(request_id))
            while request_id not in sink.received_s:
                sink.arrived.clear()
                await sink.arrived.wait()
            latencies.append((sink.received_s[request_id] - started_s) * 1e3)
            await asyncio.sleep(0.002)
        _print_latency("Millrace: publish to the worker's receipt", latencies)
        print(f"rate, a backlog of {num_backlog} requests, one worker with 64 slots")
        print(f"  {'JetStream alone: pull and acknowledge':<44} {rate:8.0f} /s")
        sink.received_s.clear()
        sink.num_slots = 0
        await asyncio.sleep(2 * _HEARTBEAT_S)
        await _publish_many(publisher, "many", _MODEL, num_backlog)
        sink.num_slots = 64
        await sink.wait_for(1)
        started_s = time.perf_counter()
        await sink.wait_for(num_backlog)
        took_s = time.perf_counter() - started_s
        print(f"  {'Millrace: dispatched, taken, acknowledged':<44} {num_backlog / took_s:8.0f} /s")
    await sink.close()
    await worker_bus.close()
    await publisher.close()


async def _publish_many(bus: Bus, prefix: str, model: str, count: int) -> None:
    for start in range(0, count, 64):
        batch = range(start, min(start + 64, count))
        await asyncio.gather(*(bus.jobs.publish(_job(f"{prefix}-{n}", model)) for n in batch))


async def _bare_latency(publisher: Bus, consumer: Bus, count: int) -> list[float]:
    latencies: list[float] = []
    for number in range(count):
        pulling = asyncio.create_task(consumer.jobs.pull("bare", 1, 5.0))
        await asyncio.sleep(0.002)
        started_s = time.perf_counter()
        await publisher.jobs.publish(_job(f"bare-{number}", "bare"))
        (leased,) = await pulling
        latencies.append((time.perf_counter() - started_s) * 1e3)
        await consumer.jobs.ack(leased.lease)
    return latencies


async def _bare_rate(publisher: Bus, consumer: Bus, count: int) -> float:
    await _publish_many(publisher, "rate", "bare", count)
    started_s = time.perf_counter()
    left = count
    while left:
        pulled = await consumer.jobs.pull("bare", 64, 5.0)
        await asyncio.gather(*(consumer.jobs.ack(leased.lease) for leased in pulled))
        left -= len(pulled)
    return count / (time.perf_counter() - started_s)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dispatch", description=__doc__)
    parser.add_argument("--requests", type=int, default=500, help="for the latency")
    parser.add_argument("--backlog", type=int, default=5_000, help="for the rate")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        server = NatsServer(Path(directory) / "nats")
        server.start()
        try:
            measuring = _measure(server.url, arguments.requests, arguments.backlog)
            uvloop.run(asyncio.wait_for(measuring, _TIMEOUT_S))
        finally:
            server.stop()


if __name__ == "__main__":
    main()
