"""Broker of Apache Kafka with its own controller, on a folder and two loopback ports."""

from __future__ import annotations

import asyncio
import subprocess
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from millrace.schemas.errors import ConfigError, MillraceError

HOST = "127.0.0.1"
_FORMAT_TIMEOUT_S = 120.0
_ANSWER_TIMEOUT_S = 2.0
# Request ApiVersions, version 0, of a client named "probe".
API_VERSIONS_REQUEST = b"\x00\x00\x00\x0f\x00\x12\x00\x00\x00\x00\x00\x01\x00\x05probe"
_JVM = (
    *("-Xms64m", "-Xmx256m", "-XX:MaxDirectMemorySize=128m", "-XX:+UseSerialGC"),
    *(
        "-XX:TieredStopAtLevel=1",
        "-Xshare:auto",
        "-XX:-UsePerfData",
        "-Djava.net.preferIPv4Stack=true",
    ),
    # The supervisor restarts it.
    "-XX:+ExitOnOutOfMemoryError",
)
# Retention: the default of the outbox; it also keeps partitions from filling the disk.
RETENTION_HOURS = 7 * 24
RETENTION_BYTES = 1024**3
_SEGMENT_BYTES = 64 * 1024**2
_REQUEST_BYTES = 32 * 1024**2
# The supervisor shows the last log line, so the last line must name the error.
_LOGGING = """\
Configuration:
  Appenders:
    Console:
      name: out
      PatternLayout:
        pattern: "%notEmpty{%throwable%n}%d %p %m (%c)%notEmpty{: %throwable{short.message}}%n"
  Loggers:
    Root:
      level: WARN
      AppenderRef:
        - ref: out
"""


class KafkaFormatError(MillraceError, code="kafka_not_formatted"):
    """Error if the folder of a broker cannot be used."""


@dataclass(frozen=True)
class KafkaProgram:
    """Command of a broker: ``java`` with all jars of a folder."""

    java: Path
    jars: Path

    def command(self, main_class: str, logging: Path, arguments: Sequence[str]) -> list[str]:
        """Return the command line that runs a class of Kafka; its environment must include
        ``ENVIRONMENT``."""
        configured = f"-Dlog4j2.configurationFile={logging.as_uri()}"
        class_path = ("-cp", str(self.jars / "*"))
        return [str(self.java), *_JVM, configured, *class_path, main_class, *arguments]


# Without this, Java cannot open files whose path has letters beyond ASCII.
ENVIRONMENT = {"LC_ALL": "C.UTF-8"}


@dataclass(frozen=True)
class ApacheBroker:
    """Broker with its files in ``folder`` and its client port ``port``.

    ``properties`` extend or replace ``usual_properties``. ``format_options`` apply to the
    formatting of the folder, which is done once. Raises ConfigError for a folder that Kafka cannot
    name.
    """

    program: KafkaProgram
    folder: Path
    port: int
    controller_port: int
    properties: Mapping[str, str] = field(default_factory=dict)
    format_options: Sequence[str] = ()

    def __post_init__(self) -> None:
        if "," in str(self.folder):
            raise ConfigError(
                f"Apache Kafka takes a comma for the end of a folder's name: {self.folder} cannot "
                "be used. Name a folder without a comma, or use --kafka embedded."
            )

    @property
    def bootstrap_servers(self) -> str:
        return f"{HOST}:{self.port}"

    def command(self) -> list[str]:
        """Return the command line that runs the broker after ``prepare``."""
        return self.program.command("kafka.Kafka", self._logging, (str(self._properties_file),))

    def prepare(self) -> None:
        """Write the broker's settings, and format its folder once. Data of earlier starts stays.

        Raises KafkaFormatError, OSError.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._logging.write_text(_LOGGING, encoding="utf-8")
        self._properties_file.write_text(self._settings(), encoding="ascii")
        if not (self._data / "meta.properties").exists():
            self._format()

    async def answers(self) -> bool:
        """Return whether the broker accepts requests."""
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(HOST, self.port)
                try:
                    writer.write(API_VERSIONS_REQUEST)
                    return len(await reader.readexactly(8)) == 8
                finally:
                    writer.close()
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            return False

    @property
    def _logging(self) -> Path:
        return self.folder / "log4j2.yaml"

    @property
    def _properties_file(self) -> Path:
        return self.folder / "server.properties"

    @property
    def _data(self) -> Path:
        return self.folder / "data"

    def _format(self) -> None:
        cluster_id = urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()
        # Use "=", as an id may begin with a dash.
        options = ("format", f"--cluster-id={cluster_id}", "-c", str(self._properties_file))
        done = subprocess.run(  # noqa: S603 (a program of ours, without a shell)
            self.program.command(
                "kafka.tools.StorageTool", self._logging, (*options, *self.format_options)
            ),
            env=ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_FORMAT_TIMEOUT_S,
            check=False,
        )
        if done.returncode != 0:
            lines = f"{done.stdout}\n{done.stderr}".splitlines()
            # The lines after the words of an error are stack frames.
            words = [line for line in lines if line.strip() and not line.startswith(("\t", " "))]
            raise KafkaFormatError(
                f"Apache Kafka cannot use {self._data} ({words[-1] if words else 'no reason given'}"
                "). Move that folder away: the records are replayed"
            )

    def _settings(self) -> str:
        lines = self.usual_properties() | dict(self.properties)
        return "".join(f"{key}={_escaped(value)}\n" for key, value in lines.items())

    def usual_properties(self) -> dict[str, str]:
        """Return the settings of a broker for one machine."""
        listeners = f"PLAINTEXT://{HOST}:{self.port},CONTROLLER://{HOST}:{self.controller_port}"
        return {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@{HOST}:{self.controller_port}",
            "listeners": listeners,
            "advertised.listeners": f"PLAINTEXT://{self.bootstrap_servers}",
            "controller.listener.names": "CONTROLLER",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "log.dirs": str(self._data),
            # A consumer of a misspelled topic must get an error.
            "auto.create.topics.enable": "false",
            "log.retention.hours": str(RETENTION_HOURS),
            "log.retention.bytes": str(RETENTION_BYTES),
            "log.segment.bytes": str(_SEGMENT_BYTES),
            "offsets.topic.num.partitions": "1",
            "offsets.topic.replication.factor": "1",
            "transaction.state.log.num.partitions": "1",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "share.coordinator.state.topic.num.partitions": "1",
            "share.coordinator.state.topic.replication.factor": "1",
            "share.coordinator.state.topic.min.isr": "1",
            "group.initial.rebalance.delay.ms": "0",
            # A killed broker's registration expires sooner, so that it can come back; a broker with
            # little CPU on a busy machine keeps its own.
            "broker.session.timeout.ms": "6000",
            # Threads for one machine, with a small heap.
            "num.network.threads": "1",
            "num.io.threads": "2",
            "socket.request.max.bytes": str(_REQUEST_BYTES),
            "queued.max.request.bytes": str(_REQUEST_BYTES),
            "log.cleaner.dedupe.buffer.size": str(4 * 1024**2),
        }


def _escaped(value: str) -> str:
    """Escape a value for a Java properties file."""
    escaped = value.replace("\\", "\\\\")
    units = escaped.encode("utf-16-be", errors="surrogatepass")
    codes = (int.from_bytes(units[i : i + 2]) for i in range(0, len(units), 2))
    return "".join(chr(code) if 32 <= code < 127 else f"\\u{code:04x}" for code in codes)
