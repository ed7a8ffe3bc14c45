"""System between a published job and its tokens, as separate processes.

It has nats-server, Redis, schedulers, and workers in one process, with simulated engines by
default.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import yaml

from benchmarks.support.processes import ProcessUsage, end
from millrace.bus import nats
from millrace.bus.api import Bus
from millrace.bus.nats.permissions import Part
from millrace.schemas.config import Config, NatsConfig, RedisConfig, SchedulerConfig, WorkerConfig
from millrace.schemas.control import WorkerStatus
from millrace.schemas.engines import EngineKind
from tests.support.servers import NatsServer, RedisServer, die_with_parent
from tests.support.waiting import eventually

MODEL = "demo"
_START_TIMEOUT_S = 60.0
# Backlogs are measured, so none of them may be shed.
_MAX_QUEUED = 1_000_000


class SimulatedSystem:
    """System that runs until its ``simulated_system`` block ends.

    ``bus`` is the measuring process's own connection.
    """

    def __init__(self, directory: Path, config: Config, bus: Bus) -> None:
        self.config = config
        self.bus = bus
        self.statuses: dict[str, WorkerStatus] = {}
        self.schedulers: list[subprocess.Popen[bytes]] = []
        self._workers: list[subprocess.Popen[bytes]] = []
        self._directory = directory
        self._file = directory / "config.yaml"
        self._file.write_text(yaml.safe_dump(msgspec.to_builtins(config), sort_keys=False))

    async def start_scheduler(self) -> None:
        """Start a scheduler; return once its queue status was received."""
        heard = asyncio.Event()
        subscription = await self.bus.control.subscribe_queue_status(lambda _: heard.set())
        self.schedulers.append(self._start("millrace.scheduler", len(self.schedulers), ()))
        await asyncio.wait_for(heard.wait(), _START_TIMEOUT_S)
        await subscription.close()

    async def kill_scheduler(self, number: int) -> None:
        """Kill a scheduler with ``kill -9``; other schedulers take over when its leases expire."""
        self.schedulers[number].kill()
        await asyncio.to_thread(self.schedulers[number].wait)

    def restart_scheduler(self, number: int) -> None:
        """Restart a killed scheduler."""
        self.schedulers[number] = self._start("millrace.scheduler", number, ())

    async def start_workers(self, count: int, engine: EngineKind) -> None:
        """Start ``count`` workers in one process; return when all have announced themselves."""
        options = ("--engine", engine.value, "--count", str(count))
        self._workers.append(self._start("millrace.workers", len(self._workers), options))
        await self.bus.workers.watch(self._note)
        await eventually(lambda: len(self.statuses) >= count, timeout_s=_START_TIMEOUT_S)

    def _note(self, status: WorkerStatus) -> None:
        self.statuses[status.worker_id] = status

    def scheduler_cpu_s(self) -> float:
        """CPU time of all schedulers so far, in seconds."""
        return sum(ProcessUsage(process.pid).cpu_s() for process in self.schedulers)

    def _start(
        self, package: str, number: int, options: tuple[str, ...]
    ) -> subprocess.Popen[bytes]:
        with (self._directory / f"{package}-{number}.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", package, "--config", str(self._file), *options],
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,
            )

    def stop(self) -> None:
        end(*self._workers, *self.schedulers)


@contextlib.asynccontextmanager
async def simulated_system(
    num_workers: int = 0,
    num_schedulers: int = 1,
    *,
    scheduler: SchedulerConfig | None = None,
    worker: WorkerConfig | None = None,
    engine: EngineKind = EngineKind.SIMULATED,
    max_queued_jobs: int = _MAX_QUEUED,
) -> AsyncIterator[SimulatedSystem]:
    """Run the servers, schedulers and workers; the block may start more.

    Their files and logs are deleted at the end.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        directory = Path(folder)
        nats_server = stack.enter_context(NatsServer(directory / "nats", "max_payload: 8MB"))
        redis_server = stack.enter_context(RedisServer(directory / "redis"))
        config = Config(
            log_level="warning",
            nats=NatsConfig(url=nats_server.url, max_stored_jobs=_MAX_QUEUED),
            redis=RedisConfig(url=f"{redis_server.url}/0"),
            scheduler=msgspec.structs.replace(
                scheduler or SchedulerConfig(), models=(MODEL,), max_queued_jobs=max_queued_jobs
            ),
            worker=worker or WorkerConfig(),
        )
        bus = await nats.connect(config.nats, "benchmark", part=Part.SCHEDULER)
        system = SimulatedSystem(directory, config, bus)
        stack.callback(system.stop)
        try:
            for _ in range(num_schedulers):
                await system.start_scheduler()
            if num_workers:
                await system.start_workers(num_workers, engine)
            yield system
        finally:
            await bus.close()
