"""Scrape targets for Prometheus: all parts of a local system, including temporary ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from millrace.cli.local.ports import PortPicker
from millrace.cli.local.supervisor import Process, Supervisor
from millrace.schemas.config import MetricsConfig

FILE_NAME = "metrics-targets.json"
# OpenTelemetry's usual exporter port; a gateway on another port shifts it by the same distance.
FIRST_PORT = 9464
_GATEWAY_PORT = 8000
_MOST_PORT = 65_000


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Entry of a file of Prometheus' ``file_sd_configs``."""

    targets: tuple[str, ...]
    labels: dict[str, str]


@dataclass
class ScrapeTargets:
    """Ports of all parts, the same at each of their starts, and the file that lists them.

    The file lists parts between ``add`` and ``remove``. ``wanted.port`` is the first port to try;
    0: derived from the gateway's port, so that systems on one machine do not collide.
    """

    file: Path
    wanted: MetricsConfig
    gateway_port: int = _GATEWAY_PORT
    _ports: dict[str, int] = field(default_factory=dict)
    _targets: dict[str, Target] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._picker = PortPicker(host=self.wanted.host)

    def add(self, name: str, part: str) -> int:
        """Return the port of a part of this name. Raises ConfigError if no port is free."""
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

    def addresses(self) -> dict[str, str]:
        """Return the metrics address of each part in the file: host:port, by name."""
        return {name: target.targets[0] for name, target in self._targets.items()}

    def remove(self, name: str) -> None:
        """Remove a part that has stopped for good. Its port stays reserved for the next part of its
        name."""
        if self._targets.pop(name, None) is not None:
            self._write()

    def close(self) -> None:
        """Remove the file and release the ports."""
        self._targets.clear()
        self._picker.close()
        self.file.unlink(missing_ok=True)

    def _first_port(self) -> int:
        port = FIRST_PORT + self.gateway_port - _GATEWAY_PORT
        return port if port <= _MOST_PORT else FIRST_PORT

    def _write(self) -> None:
        """Write the file atomically, since Prometheus may read it at any moment."""
        encoded = msgspec.json.encode(list(self._targets.values()))
        fresh = self.file.with_suffix(".new")
        fresh.write_bytes(msgspec.json.format(encoded, indent=2) + b"\n")
        fresh.replace(self.file)


@dataclass
class TargetedProcesses:
    """Processes of a supervisor that leave the targets' file when they are stopped for good."""

    supervisor: Supervisor
    targets: ScrapeTargets

    async def start(self, process: Process) -> None:
        """Start a process. Raises StartError."""
        await self.supervisor.start(process)

    async def remove(self, name: str) -> None:
        await self.supervisor.remove(name)
        self.targets.remove(name)


def metrics_env(port: int) -> Mapping[str, str]:
    """Return the environment variables that set a process's metrics port."""
    return {"MILLRACE_METRICS__PORT": str(port)}
