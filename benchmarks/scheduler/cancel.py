"""Time until a cancelled request's blocks are free, beside the engine step in flight.

    python -m benchmarks.scheduler --only cancel [--model demo] [--streams 16] [--cancels 300]

A worker with its engine in a process of its own, on a real nats-server. While ``--streams``
requests decode, one of them is cancelled at a random moment, from another connection, as a gateway
does. The measurement ends when the engine reports that the request is gone and its blocks are free.
Another request takes its place. An engine receives a cancel between two steps, so the time is at
most the rest of a step plus the transport. The goal: no more than one step + 5 ms.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import tempfile
import time
from collections import deque
from pathlib import Path

from benchmarks.support.figures import p50_p99, percentile
from millrace.bus import nats
from millrace.bus.api import Bus
from millrace.bus.job_queue import TenantQueue
from millrace.bus.nats.permissions import Part
from millrace.bus.running_requests import RunningRequest
from millrace.engine.types import EngineOutput, EngineStats
from millrace.registry.catalogue import load_catalogue
from millrace.registry.served import ServedModel
from millrace.runtime.clock import SystemClock
from millrace.schemas.config import EngineConfig, NatsConfig, WorkerConfig
from millrace.schemas.control import Cancel, Dispatch
from millrace.schemas.jobs import Job, Tier
from millrace.schemas.sampling import SamplingParams
from millrace.workers.host.worker import Worker
from millrace.workers.process.engine_process import EngineClient
from millrace.workers.process.keeper import EngineKeeper
from tests.support.servers import NatsServer

_GOAL_MS = 5.0
_PROMPT_TOKENS = 32
_MAX_TOKENS = 1_500
_WARM_STEPS = 20
_TENANT = "bench"
_TIMEOUT_S = 30.0


class NoIndex:
    """Index without entries, see ``workers.host.leases.Generations``."""

    async def start(self, request_id: str, worker_id: str, epoch: int, lease: str = "") -> None: ...

    async def drop(self, request_id: str, worker_id: str) -> None: ...

    async def finish(self, request_id: str, worker_id: str, epoch: int) -> None: ...

    async def lookup(self, _request_id: str) -> RunningRequest | None:
        return None


class Watch:
    """Listener for an engine's reports, before its worker; ``steps_ms`` are the last steps."""

    def __init__(self, client: EngineClient) -> None:
        self.stats = client.stats
        self.steps_ms: deque[float] = deque(maxlen=512)
        self._changed = asyncio.Event()
        self._forward = client.on_outputs
        client.on_outputs = self._on_outputs

    def _on_outputs(self, outputs: list[EngineOutput], stats: EngineStats) -> None:
        num_steps = stats.num_steps - self.stats.num_steps
        if num_steps:
            self.steps_ms.append((stats.busy_s - self.stats.busy_s) / num_steps * 1e3)
        self.stats = stats
        self._changed.set()
        self._forward(outputs, stats)

    async def until_running(self, num_running: int) -> None:
        """Wait until ``num_running`` requests are in the batch, and none waits."""
        async with asyncio.timeout(_TIMEOUT_S):
            while (self.stats.num_running, self.stats.num_waiting) != (num_running, 0):
                self._changed.clear()
                await self._changed.wait()

    async def until_step(self, number: int) -> None:
        async with asyncio.timeout(_TIMEOUT_S):
            while self.stats.num_steps < number:
                self._changed.clear()
                await self._changed.wait()


class Bench:
    """Worker under load, controlled from a separate connection."""

    def __init__(self, bus: Bus, worker: Worker, watch: Watch, model: str, vocab_size: int) -> None:
        self.watch = watch
        self._bus = bus
        self._worker = worker
        self._model = model
        self._vocab_size = vocab_size
        self._random = random.Random(0)
        self._names = (f"r{number}" for number in itertools.count())
        self._live: list[str] = []

    async def add(self) -> None:
        """Add a request, which decodes until it is cancelled."""
        name = next(self._names)
        prompt = tuple(self._random.randrange(self._vocab_size) for _ in range(_PROMPT_TOKENS))
        job = Job(
            request_id=name,
            model=self._model,
            tenant=_TENANT,
            prompt_token_ids=prompt,
            sampling=SamplingParams(
                max_tokens=_MAX_TOKENS, temperature=1.0, seed=len(name), ignore_eos=True
            ),
        )
        await self._bus.jobs.publish(job)
        (leased,) = await self._bus.jobs.pull(
            TenantQueue(self._model, Tier.FREE, _TENANT), 1, _TIMEOUT_S
        )
        command = Dispatch(job=leased.job, epoch=1, lease=leased.lease)
        reply = await self._bus.control.command(self._worker.worker_id, command, _TIMEOUT_S)
        assert reply is not None
        assert reply.ok, reply
        self._live.append(name)
        await self.watch.until_running(len(self._live))

    async def cancel_one(self) -> tuple[float, float]:
        """Cancel a request; return the ms until its blocks were free, and of the step in flight."""
        step_ms = percentile(self.watch.steps_ms, 0.5)
        await asyncio.sleep(self._random.random() * step_ms / 1e3)
        name = self._live.pop(self._random.randrange(len(self._live)))
        begin_s, num_steps = time.perf_counter(), self.watch.stats.num_steps
        await self._bus.control.cancel(Cancel(request_id=name))
        await self.watch.until_running(len(self._live))
        took_ms = (time.perf_counter() - begin_s) * 1e3
        if self.watch.stats.num_steps > num_steps:
            # The step in flight has ended by now, so it is the last one.
            step_ms = self.watch.steps_ms[-1]
        return took_ms, step_ms

    async def cancel_all(self) -> None:
        for name in self._live:
            await self._bus.control.cancel(Cancel(request_id=name))
        self._live.clear()
        await self.watch.until_running(0)


async def measure(model: str, num_streams: int, num_cancels: int) -> list[tuple[float, float]]:
    """Return (ms until the blocks were free, ms of the step) of each cancel."""
    catalogue = load_catalogue("").with_model(model)
    name = catalogue.entry_for(model).name
    served = ServedModel.load(catalogue, name)
    config = WorkerConfig(
        model=name, engine=EngineConfig(max_num_sequences=num_streams, prefix_cache=False)
    )
    with tempfile.TemporaryDirectory() as folder, NatsServer(Path(folder)) as server:
        nats_config = NatsConfig(url=server.url)
        bus, peer = (
            await nats.connect(nats_config, "worker", part=Part.SCHEDULER),
            await nats.connect(nats_config, "gw", part=Part.SCHEDULER),
        )
        client = await EngineClient.start(served.path, config.engine)
        try:

            async def start() -> EngineClient:
                return await EngineClient.start(served.path, config.engine)

            clock = SystemClock()
            keeper = EngineKeeper(client, start, clock)
            worker = Worker(bus, config, served, keeper, clock, NoIndex())
            stopping = asyncio.Event()
            running = asyncio.create_task(worker.run(stopping))
            await worker.ready.wait()
            watch = Watch(client)
            bench = Bench(peer, worker, watch, name, served.tokenizer.vocab_size)
            figures = await _rounds(bench, num_streams, num_cancels)
            stopping.set()
            await running
            return figures
        finally:
            await client.close()
            await peer.close()
            await bus.close()


async def _rounds(bench: Bench, num_streams: int, num_cancels: int) -> list[tuple[float, float]]:
    num_free_blocks = bench.watch.stats.num_free_blocks
    for _ in range(num_streams):
        await bench.add()
    await bench.watch.until_step(bench.watch.stats.num_steps + _WARM_STEPS)
    figures: list[tuple[float, float]] = []
    for _ in range(num_cancels):
        figures.append(await bench.cancel_one())
        await bench.add()
    await bench.cancel_all()
    assert bench.watch.stats.num_free_blocks == num_free_blocks, "blocks are lost"
    return figures


def run(model: str = "demo", streams: int = 16, cancels: int = 300) -> None:
    """Measure ``model``, a name of the catalogue or a folder."""
    figures = asyncio.run(measure(model, streams, cancels))
    rows = {
        "cancel published to blocks free": [took_ms for took_ms, _ in figures],
        "the engine's step at that time": [step_ms for _, step_ms in figures],
        "beyond that step": [took_ms - step_ms for took_ms, step_ms in figures],
    }
    print(f"{streams} streams, {len(figures)} cancels")
    for title, values in rows.items():
        print(f"{title:32}  {p50_p99(values, '7.2f')}")
    print(f"goal: no more than one step + {_GOAL_MS:g} ms")
