"""A system over three hosts: on each a nats-server of one cluster, a gateway, a scheduler and a
worker with a simulated engine. Redis is on a fourth."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import yaml

from millrace.bus import nats
from millrace.bus.nats.permissions import Part
from millrace.runtime.binaries import nats_server_path, redis_server_path
from millrace.schemas.config import (
    Config,
    EngineConfig,
    GatewayConfig,
    MetricsConfig,
    NatsConfig,
    RedisConfig,
    SchedulerConfig,
    WorkerConfig,
)
from millrace.schemas.config.worker import SimulationConfig
from millrace.schemas.control import WorkerStatus
from millrace.schemas.engines import EngineKind
from tests.support.links.network import Network
from tests.support.waiting import eventually

MODEL = "demo"
HOSTS = (1, 2, 3)
NUM_HOSTS = _REDIS_HOST = 4
_NATS, _ROUTES, _GATEWAY, _REDIS = 4222, 6222, 8000, 6379
_START_TIMEOUT_S = 90.0
_STEP_MS = 80.0


def gateway_url(host: int) -> str:
    return f"http://{Network.address(host)}:{_GATEWAY}"


class HostedSystem:
    """Its parts run until the network's block ends; ``logs`` has a file for each."""

    def __init__(self, network: Network, folder: Path) -> None:
        """A network of ``NUM_HOSTS``."""
        self.network = network
        self.logs = folder
        self.statuses: dict[str, WorkerStatus] = {}

    def start_servers(self) -> None:
        for host in HOSTS:
            self._start_nats(host)
        command = [str(redis_server_path()), "--port", str(_REDIS), "--save", ""]
        address = Network.address(_REDIS_HOST)
        bound = ["--bind", address, "--protected-mode", "no", "--dir", str(self.logs)]
        self.network.start(_REDIS_HOST, [*command, *bound], self._log("redis"))

    async def start_parts(self) -> None:
        """Returns once every worker was heard."""
        url = ",".join(f"nats://{Network.address(host)}:{_NATS}" for host in HOSTS)
        config = NatsConfig(url=url, replicas=len(HOSTS), connect_timeout_s=30.0)
        bus = await nats.connect(config, "hosts", part=Part.SCHEDULER)
        await bus.workers.watch(self._note)
        for host in HOSTS:
            self._start_host(host, config)
        await eventually(lambda: len(self.statuses) == len(HOSTS), timeout_s=_START_TIMEOUT_S)
        await bus.close()

    def _note(self, status: WorkerStatus) -> None:
        self.statuses[status.name] = status

    def _start_host(self, host: int, config: NatsConfig) -> None:
        settings = Config(
            log_level="info",
            nats=config,
            redis=RedisConfig(url=f"redis://{Network.address(_REDIS_HOST)}:{_REDIS}/0"),
            gateway=GatewayConfig(
                host=Network.address(host), port=_GATEWAY, gateway_id=f"gateway-{host}", auth="none"
            ),
            scheduler=SchedulerConfig(models=(MODEL,), scheduler_id=f"scheduler-{host}"),
            worker=WorkerConfig(
                name=f"worker-{host}",
                engine=EngineConfig(
                    kind=EngineKind.SIMULATED, simulation=SimulationConfig(step_ms=_STEP_MS)
                ),
            ),
            metrics=MetricsConfig(port=0),
        )
        file = self.logs / f"host-{host}.yaml"
        file.write_text(yaml.safe_dump(msgspec.to_builtins(settings), sort_keys=False))
        for part in ("gateway", "scheduler", "workers"):
            command = [sys.executable, "-P", "-m", f"millrace.{part}", "--config", str(file)]
            self.network.start(host, command, self._log(f"{part}-{host}"))

    def _start_nats(self, host: int) -> None:
        address = Network.address(host)
        routes = ", ".join(f'"nats://{Network.address(other)}:{_ROUTES}"' for other in HOSTS)
        file = self.logs / f"nats-{host}.conf"
        file.write_text(
            f'server_name: nats-{host}\nlisten: "{address}:{_NATS}"\n'
            f'jetstream {{ store_dir: "{self.logs / f"store-{host}"}" }}\n'
            f'cluster {{ name: hosts, listen: "{address}:{_ROUTES}", routes: [{routes}] }}\n'
        )
        self.network.start(
            host, [str(nats_server_path()), "-c", str(file)], self._log(f"nats-{host}")
        )

    def _log(self, part: str) -> Path:
        return self.logs / f"{part}.log"
