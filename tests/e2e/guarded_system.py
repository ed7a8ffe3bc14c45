"""Every part as a process of its own, on a nats-server that lets each do its own work only."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import yaml

from millrace.bus import nats as nats_bus
from millrace.bus.api import Bus
from millrace.bus.nats.permissions import Part
from millrace.runtime.addresses import open_directly
from millrace.schemas.config import (
    ClickHouseConfig,
    Config,
    EngineConfig,
    GatewayConfig,
    KafkaConfig,
    NatsConfig,
    RedisConfig,
    SchedulerConfig,
    SimulationConfig,
    WorkerConfig,
)
from millrace.schemas.control import WorkerStatus
from millrace.schemas.engines import EngineKind
from millrace.telemetry.kafka.embedded import EmbeddedKafka
from tests.support.nats.users import NatsWithUsers, nats_with_users
from tests.support.servers import RedisServer, die_with_parent, free_port
from tests.support.waiting import eventually

_START_S = 90.0
_STOP_S = 15.0
_USERS = {
    "gateway": Part.GATEWAY,
    "scheduler": Part.SCHEDULER,
    "workers": Part.WORKER,
    "telemetry": Part.TELEMETRY,
}


class GuardedSystem:
    """``bus`` is the operator's own connection. ``statuses`` are the workers', by name."""

    def __init__(self, directory: Path, nats: NatsWithUsers, config: Config, bus: Bus) -> None:
        self.nats = nats
        self.config = config
        self.bus = bus
        self.statuses: dict[str, WorkerStatus] = {}
        self._directory = directory
        self._file = directory / "config.yaml"
        self._file.write_text(yaml.safe_dump(msgspec.to_builtins(config), sort_keys=False))
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def http(self) -> str:
        return f"http://127.0.0.1:{self.config.gateway.port}"

    async def start(self, package: str, name: str, *options: str) -> None:
        """Start one more process and wait until it serves."""
        environment = {
            "MILLRACE_NATS__URL": self.nats.url_of(_USERS[package].value),
            "MILLRACE_WORKER__NAME": name,
        }
        with (self._directory / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    f"millrace.{package}",
                    "--config",
                    str(self._file),
                    *options,
                ],
                stdout=log,
                stderr=log,
                env=os.environ | environment,
                preexec_fn=die_with_parent,
            )
        await eventually(lambda: self._serves(package, name), _START_S, f"{name} to serve")

    def _serves(self, package: str, name: str) -> bool:
        assert self._processes[name].poll() is None, self.log(name)[-2_000:]
        match package:
            case "gateway":
                return answers(f"{self.http}/healthz")
            case "telemetry":
                return "telemetry is ready" in self.log(name)
            case "workers":
                return name in self.statuses and not self.statuses[name].retired
            case _:
                return "ready" in self.log(name)

    def note(self, status: WorkerStatus) -> None:
        self.statuses[status.name] = status

    def log(self, name: str) -> str:
        return (self._directory / f"{name}.log").read_text()

    def forbidden(self) -> list[str]:
        """Return log lines about subjects that the server forbade to a part."""
        lines = [line for file in self._directory.glob("*.log") for line in file.open()]
        return [line for line in lines if "forbids a subject to this process" in line]

    def kill(self, name: str) -> None:
        process = self._processes.pop(name)
        process.kill()
        process.wait()
        self.statuses.pop(name, None)

    def drain(self, name: str) -> subprocess.Popen[bytes]:
        """SIGTERM; the process, which ends by and by."""
        process = self._processes.pop(name)
        process.send_signal(signal.SIGTERM)
        return process

    def stop(self) -> None:
        processes = list(self._processes.values())
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def answers(url: str) -> bool:
    try:
        with open_directly(url, timeout_s=1.0) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@contextlib.asynccontextmanager
async def guarded_system(directory: Path) -> AsyncIterator[GuardedSystem]:
    """Servers, telemetry, a gateway, a scheduler and two workers whose tokens take 20 ms each."""
    async with contextlib.AsyncExitStack() as stack:
        nats = stack.enter_context(nats_with_users(directory / "nats"))
        redis = RedisServer(directory / "redis")
        redis.start()
        stack.callback(redis.stop)
        kafka = EmbeddedKafka()
        stack.callback(kafka.close)
        simulation = SimulationConfig(step_ms=20.0)
        config = Config(
            nats=NatsConfig(url=nats.url, connect_timeout_s=20.0),
            redis=RedisConfig(url=f"{redis.url}/0"),
            kafka=KafkaConfig(bootstrap_servers=kafka.bootstrap_servers),
            clickhouse=ClickHouseConfig(
                path=str(directory / "clickhouse"),
                password=secrets.token_hex(12),
                serve_port=free_port(),
            ),
            gateway=GatewayConfig(port=free_port()),
            scheduler=SchedulerConfig(models=("demo",)),
            worker=WorkerConfig(
                engine=EngineConfig(kind=EngineKind.SIMULATED, simulation=simulation)
            ),
        )
        # The operator finds streams, and creates none.
        scheduler = nats.config_of("scheduler")
        await (await nats_bus.connect(scheduler, "test", part=Part.SCHEDULER)).close()
        bus = await nats_bus.connect(nats.config_of("operator"), "test", part=Part.OPERATOR)
        stack.push_async_callback(bus.close)
        system = GuardedSystem(directory, nats, config, bus)
        stack.callback(system.stop)
        await bus.workers.watch(system.note)
        parts = (
            ("scheduler", "scheduler-1"),
            ("workers", "worker-1"),
            ("workers", "worker-2"),
            ("gateway", "gateway-1"),
            ("telemetry", "telemetry-1"),
        )
        await asyncio.gather(*(system.start(package, name) for package, name in parts))
        yield system
