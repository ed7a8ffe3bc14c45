"""Apache Kafka itself: one broker in KRaft mode on the machine's JDK, from its Maven artifacts."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import socket
import subprocess
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from pathlib import Path

from tests.support.certificates import Authority
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
        self._prepare()
        self._class_path = str(kafka_jars() / "*")
        self._config_path = directory / "server.properties"
        self._config_path.write_text(self._properties(controller_port=free_port()))
        (directory / "log4j2.yaml").write_text(_LOGGING)
        self._format()

    def _prepare(self) -> None:
        """Called before the broker's files are written."""

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
            *self._format_options(),
        )
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_FORMAT_TIMEOUT_S, check=False
        )
        assert done.returncode == 0, f"formatting failed:\n{done.stdout}{done.stderr}"

    def _format_options(self) -> list[str]:
        return []

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
            # A killed broker's registration expires sooner, so that it may come back.
            "broker.session.timeout.ms": "1500",
            "broker.heartbeat.interval.ms": "300",
            "num.network.threads": "1",
            "num.io.threads": "2",
        }
        self._adjust(lines)
        return "".join(f"{key}={value}\n" for key, value in lines.items())

    def _adjust(self, properties: dict[str, str]) -> None:
        """Change the broker's properties."""


class SecureKafkaBroker(KafkaBroker):
    """A broker with more listeners, all with TLS: ``sasl_port`` for ``users``, by PLAIN and SCRAM;
    ``mutual_port`` for clients with a certificate of the authority; ``expired_port``, whose own
    certificate has expired. The certificates are for 127.0.0.1."""

    def __init__(self, directory: Path, authority: Authority, users: Mapping[str, str]) -> None:
        self._authority = authority
        self._users = users
        self.sasl_port, self.mutual_port, self.expired_port = (free_port() for _ in range(3))
        super().__init__(directory)

    def _prepare(self) -> None:
        for name, expired in (("broker", False), ("expired", True)):
            pair = self._authority.sign(name, ("127.0.0.1",), expired=expired)
            store = self.directory / f"{name}-store.pem"
            store.write_bytes(pair.key.read_bytes() + pair.certificate.read_bytes())

    def _format_options(self) -> list[str]:
        return [
            option
            for mechanism in ("SCRAM-SHA-256", "SCRAM-SHA-512")
            for name, password in self._users.items()
            for option in ("--add-scram", f"{mechanism}=[name={name},password={password}]")
        ]

    def _adjust(self, properties: dict[str, str]) -> None:
        secured = {
            "SASLSSL": self.sasl_port,
            "MUTUAL": self.mutual_port,
            "EXPIRED": self.expired_port,
        }
        listeners = "".join(f",{name}://127.0.0.1:{port}" for name, port in secured.items())
        properties["listeners"] += listeners
        properties["advertised.listeners"] += listeners
        properties["listener.security.protocol.map"] += ",SASLSSL:SASL_SSL,MUTUAL:SSL,EXPIRED:SSL"
        plain = "".join(f' user_{name}="{word}"' for name, word in self._users.items())
        modules = "org.apache.kafka.common.security"
        scram = f"{modules}.scram.ScramLoginModule required;"
        properties.update(
            {
                "ssl.keystore.type": "PEM",
                "ssl.keystore.location": str(self.directory / "broker-store.pem"),
                "ssl.truststore.type": "PEM",
                "ssl.truststore.location": str(self._authority.certificate),
                "listener.name.mutual.ssl.client.auth": "required",
                "listener.name.expired.ssl.keystore.type": "PEM",
                "listener.name.expired.ssl.keystore.location": str(
                    self.directory / "expired-store.pem"
                ),
                "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512",
                "listener.name.saslssl.plain.sasl.jaas.config": (
                    f"{modules}.plain.PlainLoginModule required{plain};"
                ),
                "listener.name.saslssl.scram-sha-256.sasl.jaas.config": scram,
                "listener.name.saslssl.scram-sha-512.sasl.jaas.config": scram,
            }
        )


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
