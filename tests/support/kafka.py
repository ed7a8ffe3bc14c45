"""Apache Kafka itself: one broker in KRaft mode on the machine's JDK, from its Maven artifacts."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import socket
import subprocess
import uuid
from base64 import urlsafe_b64encode
from pathlib import Path

from tests.support.servers import Server, free_port

_POM = Path(__file__).with_name("kafka-pom.xml")
_CACHE = Path(__file__).resolve().parents[2] / ".cache" / "kafka"
_COPY = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy-dependencies"
_FETCH_TIMEOUT_S = 300.0
_FORMAT_TIMEOUT_S = 60.0
_JVM = ("-Xmx384m", "-Xms128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto")


def missing_tool() -> str | None:
    """The tool that this machine lacks to run a broker, if any."""
    return next((tool for tool in ("java", "mvn") if shutil.which(tool) is None), None)


def kafka_jars() -> Path:
    """The folder of the broker's jars, fetched once for each version of the pom.

    Several test processes may ask at once: one fetches, the others wait for it.
    """
    digest = hashlib.sha256(_POM.read_bytes()).hexdigest()[:12]
    folder = _CACHE / f"jars-{digest}"
    _CACHE.mkdir(parents=True, exist_ok=True)
    with (_CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            partial = _CACHE / f"partial-{digest}"
            shutil.rmtree(partial, ignore_errors=True)
            fetched = subprocess.run(
                [
                    *("mvn", "-q", "-B", "-f", str(_POM), _COPY),
                    *(f"-DoutputDirectory={partial}", "-DincludeScope=runtime"),
                ],
                capture_output=True,
                text=True,
                timeout=_FETCH_TIMEOUT_S,
                check=False,
            )
            assert fetched.returncode == 0, f"mvn failed:\n{fetched.stdout[-3000:]}{fetched.stderr}"
            partial.rename(folder)
    return folder


class KafkaBroker(Server):
    """A broker and its own controller, with its data in ``directory``."""

    scheme = "kafka"
    start_timeout_s = 90.0  # it loads thousands of classes, perhaps beside other tests

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._class_path = str(kafka_jars() / "*")
        self._config_path = directory / "server.properties"
        self._config_path.write_text(self._properties(controller_port=free_port()))
        (directory / "log4j2.yaml").write_text(_LOGGING)
        self._format()

    @property
    def bootstrap_servers(self) -> str:
        return f"127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        return self._java("kafka.Kafka", str(self._config_path))

    def greets(self, connection: socket.socket) -> bool:
        """It answers ApiVersions, which it does once it takes requests."""
        body = b"\x00\x12\x00\x00\x00\x00\x00\x01\x00\x05probe"
        connection.sendall(len(body).to_bytes(4) + body)
        return len(connection.recv(8)) == 8

    def _java(self, main_class: str, *arguments: str) -> list[str]:
        logging = f"-Dlog4j2.configurationFile={self.directory / 'log4j2.yaml'}"
        return ["java", *_JVM, logging, "-cp", self._class_path, main_class, *arguments]

    def _format(self) -> None:
        cluster_id = urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()
        command = self._java(
            "kafka.tools.StorageTool",
            # With "=", as an id may begin with a dash.
            *("format", f"--cluster-id={cluster_id}", "-c", str(self._config_path)),
        )
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_FORMAT_TIMEOUT_S, check=False
        )
        assert done.returncode == 0, f"formatting failed:\n{done.stdout}{done.stderr}"

    def _properties(self, controller_port: int) -> str:
        lines = {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@127.0.0.1:{controller_port}",
            "listeners": (
                f"PLAINTEXT://127.0.0.1:{self.port},CONTROLLER://127.0.0.1:{controller_port}"
            ),
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{self.port}",
            "controller.listener.names": "CONTROLLER",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "log.dirs": str(self.directory / "data"),
            "auto.create.topics.enable": "false",
            "offsets.topic.num.partitions": "1",
            "offsets.topic.replication.factor": "1",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "group.initial.rebalance.delay.ms": "0",
            # A killed broker's registration is let go of sooner, so that it may come back.
            "broker.session.timeout.ms": "1500",
            "broker.heartbeat.interval.ms": "300",
            "num.network.threads": "1",
            "num.io.threads": "2",
        }
        return "".join(f"{key}={value}\n" for key, value in lines.items())


_LOGGING = """\
Configuration:
  Appenders:
    Console:
      name: out
      PatternLayout:
        pattern: "%d %p %m (%c)%n"
  Loggers:
    Root:
      level: WARN
      AppenderRef:
        - ref: out
"""
