"""Kafka servers of a local system: the stand-in in memory, and Apache Kafka."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace

from millrace.cli.local.ports import PortPicker
from millrace.cli.local.private_files import make_private
from millrace.cli.local.supervisor import StartError
from millrace.runtime.process import python_command
from millrace.schemas.config import KafkaConfig
from millrace.schemas.errors import MillraceError
from millrace.telemetry.kafka.apache.broker import ENVIRONMENT, ApacheBroker, KafkaProgram

_PORT = 9092
# Niceness of record keeping: records can wait, and should not slow down an engine on the same
# cores.
NICENESS = 10
# Access settings of a third-party Kafka do not apply to the local one.
_OWN_ACCESS = {
    **dict.fromkeys(("ca_file", "certificate_file", "key_file"), ""),
    **dict.fromkeys(("sasl_mechanism", "user", "password"), ""),
    "tls": False,
    "replication_factor": 1,
}


class KafkaServer(Protocol):
    """Server that speaks Kafka's protocol on this machine."""

    environment: Mapping[str, str]
    niceness: int

    def command(self) -> Sequence[str]:
        """Return the command line of its process."""

    def prepare(self) -> None:
        """Prepare its files before each start. Raises StartError, OSError."""

    async def is_ready(self) -> bool:
        """Return whether it serves and has an address."""

    def address(self) -> str:
        """Return its address in the current run of its process, as host:port."""

    def told(self, config: KafkaConfig) -> KafkaConfig:
        """Return the settings with its address, for telemetry."""


class StandIn:
    """Cluster in memory. It picks its own port, so each start has a new address."""

    environment: Mapping[str, str] = {}
    niceness = NICENESS

    def __init__(self, run_dir: Path) -> None:
        self._file = run_dir / "kafka.bootstrap"

    def command(self) -> Sequence[str]:
        module = "millrace.telemetry.kafka.embedded"
        return python_command(module, "--write-bootstrap", str(self._file))

    def prepare(self) -> None:
        self._file.unlink(missing_ok=True)

    async def is_ready(self) -> bool:
        return self._file.exists() and self._file.stat().st_size > 0

    def address(self) -> str:
        return self._file.read_text().strip()

    def told(self, config: KafkaConfig) -> KafkaConfig:
        return replace(config, **_OWN_ACCESS, bootstrap_servers=self.address(), partitions=1)


class ApacheServer:
    """Apache Kafka, which keeps its topics in the data folder."""

    environment: Mapping[str, str] = ENVIRONMENT
    # It uses little CPU, but its controller fences a broker that does not answer in time.
    niceness = 0

    def __init__(self, broker: ApacheBroker) -> None:
        self._broker = broker

    def command(self) -> Sequence[str]:
        return self._broker.command()

    def prepare(self) -> None:
        make_private(self._broker.folder)
        try:
            self._broker.prepare()
        except MillraceError as error:
            raise StartError(error.message) from error

    async def is_ready(self) -> bool:
        return await self._broker.answers()

    def address(self) -> str:
        return self._broker.bootstrap_servers

    def told(self, config: KafkaConfig) -> KafkaConfig:
        return replace(config, **_OWN_ACCESS, bootstrap_servers=self.address())


def kafka_server(data: Path, program: KafkaProgram | None, ports: PortPicker) -> KafkaServer:
    """Return Apache Kafka if there is a ``program`` to run, else the stand-in. Raises
    ConfigError."""
    if program is None:
        return StandIn(data / "run")
    port, controller_port = ports.pick("kafka", _PORT), ports.pick_any("kafka's controller")
    return ApacheServer(ApacheBroker(program, data / "kafka", port, controller_port))
