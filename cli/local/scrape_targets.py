"""Where Prometheus finds the parts of a local system, also those that come and go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from millrace.cli.local.ports import PortPicker
from millrace.cli.local.supervisor import Process, Supervisor
from millrace.schemas.config import MetricsConfig

FILE_NAME = "metrics-targets.json"
# Where exporters of OpenTelemetry are found; for a gateway on another port as far above that.
FIRST_PORT = 9464
_GATEWAY_PORT = 8000
_MOST_PORT = 65_000


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of a file of Prometheus' ``file_sd_configs``."""

    targets: tuple[str, ...]
    labels: dict[str, str]


@dataclass
class ScrapeTargets:
    """A port for each part, the same in all of its lives, and the file that tells of them.

    The file has those that were told to run and not to go. ``wanted.port`` is the first port to
    try; 0: one by the port of the gateway, so that systems side by side do not meet.
    """

    file: Path
    wanted: MetricsConfig
    gateway_port: int = _GATEWAY_PORT
    _ports: dict[str, int] = field(default_factory=dict)
    _targets: dict[str, Target] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._picker = PortPicker(host=self.wanted.host)

    def add(self, name: str, part: str) -> int:
        """The port for a part of this name. Raises ConfigError if none is free."""
        port = self._ports.get(name)
        if port is None:
            first = (self.wanted.port or self._first_port()) + len(self._ports)
            port = self._ports[name] = self._picker.pick(f"metrics of {name}", first)
        host = f"[{self.wanted.host}]" if ":" in self.wanted.host else self.wanted.host
        self._targets[name] = Target(
            targets=(f"{host}:{port}",), labels={"part": part, "name": name}
        )
        self._write()
        return port

    def remove(self, name: str) -> None:
        """It is stopped for good. Its port is kept for the next one of its name."""
        if self._targets.pop(name, None) is not None:
            self._write()

    def close(self) -> None:
        """Nothing runs any more."""
        self._targets.clear()
        self._picker.close()
        self.file.unlink(missing_ok=True)

    def _first_port(self) -> int:
        port = FIRST_PORT + self.gateway_port - _GATEWAY_PORT
        return port if port <= _MOST_PORT else FIRST_PORT

    def _write(self) -> None:
        """Whole or not at all: Prometheus may read it at any moment."""
        encoded = msgspec.json.encode(list(self._targets.values()))
        fresh = self.file.with_suffix(".new")
        fresh.write_bytes(msgspec.json.format(encoded, indent=2) + b"\n")
        fresh.replace(self.file)


@dataclass
class TargetedProcesses:
    """A supervisor's processes that leave the file of targets when they are stopped for good."""

    supervisor: Supervisor
    targets: ScrapeTargets

    async def start(self, process: Process) -> None:
        """Raises StartError."""
        await self.supervisor.start(process)

    async def remove(self, name: str) -> None:
        await self.supervisor.remove(name)
        self.targets.remove(name)


def metrics_env(port: int) -> Mapping[str, str]:
    """Tells a process where to show its metrics."""
    return {"MILLRACE_METRICS__PORT": str(port)}
