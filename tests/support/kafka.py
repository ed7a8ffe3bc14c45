"""Apache Kafka itself, as ``millrace up --kafka apache`` runs it, and one with TLS and users."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from millrace.runtime.binaries import MissingBinaryError
from millrace.schemas.config import KafkaConfig
from millrace.telemetry.kafka.apache.broker import (
    API_VERSIONS_REQUEST,
    ApacheBroker,
    KafkaProgram,
)
from millrace.telemetry.kafka.apache.jars import fetch_jars
from millrace.telemetry.kafka.apache.java import find_java
from tests.support.certificates import Authority
from tests.support.servers import Server, free_port


@functools.cache
def missing_tool() -> str | None:
    """The tool that this machine lacks to run a broker, if any."""
    try:
        find_java()
    except MissingBinaryError:
        return "java"
    return None


def kafka_program() -> KafkaProgram:
    """Java and the broker's jars, fetched once for this machine."""
    repository = KafkaConfig().maven_url
    return KafkaProgram(find_java(), asyncio.run(fetch_jars(repository, lambda _: None)))


class KafkaBroker(Server):
    """A broker and its own controller, with its data in ``directory``."""

    scheme = "kafka"
    start_timeout_s = 90.0  # it loads thousands of classes, perhaps beside other tests

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._prepare()
        with ThreadPoolExecutor(1) as thread:
            # A test's thread may run an event loop already.
            program = thread.submit(kafka_program).result()
        usual = ApacheBroker(program, directory, self.port, controller_port=free_port())
        properties = usual.usual_properties()
        self._adjust(properties)
        self._broker = dataclasses.replace(
            usual, properties=properties, format_options=self._format_options()
        )
        self._broker.prepare()

    def _prepare(self) -> None:
        """Called before the broker's files are written."""

    @property
    def bootstrap_servers(self) -> str:
        return self._broker.bootstrap_servers

    def command(self) -> list[str]:
        return self._broker.command()

    def greets(self, connection: socket.socket) -> bool:
        """Return whether the broker answers ApiVersions, which it does once it serves."""
        connection.sendall(API_VERSIONS_REQUEST)
        return len(connection.recv(8)) == 8

    def _format_options(self) -> list[str]:
        return []

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
