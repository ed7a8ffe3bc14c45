"""The Kafkas that records are taken through here, as processes that can be killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from millrace.schemas.config import KafkaConfig
from tests.support.kafka import KafkaBroker, missing_tool
from tests.support.servers import die_with_parent

CHOICES = ("apache", "embedded")


class Kafka(Protocol):
    """A Kafka that can be killed and started again."""

    forgets: bool

    @property
    def config(self) -> KafkaConfig: ...

    def start(self) -> None: ...

    def kill(self) -> None:
        """``kill -9``."""


class ApacheKafka(KafkaBroker):
    """A broker that comes back with what it had, at the same address."""

    forgets = False

    @property
    def config(self) -> KafkaConfig:
        return KafkaConfig(bootstrap_servers=self.bootstrap_servers)


class EmbeddedKafkaProcess:
    """The embedded cluster, which comes back empty and at another address."""

    forgets = True

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._address = ""

    @property
    def config(self) -> KafkaConfig:
        return KafkaConfig(bootstrap_servers=self._address)

    def start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "millrace.telemetry.kafka.embedded"],
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=die_with_parent,
        )
        assert self._process.stdout is not None
        self._address = self._process.stdout.readline().strip()
        if not self._address:
            raise RuntimeError("the embedded Kafka did not start")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def available() -> list[str]:
    """Those that this machine can run."""
    return [name for name in CHOICES if name == "embedded" or missing_tool() is None]


@contextmanager
def running_kafka(name: str, directory: Path) -> Iterator[Kafka]:
    """Started, and killed at the end of the block."""
    kafka = EmbeddedKafkaProcess() if name == "embedded" else ApacheKafka(directory / "kafka")
    kafka.start()
    try:
        yield kafka
    finally:
        kafka.kill()
