"""The telemetry process as it runs in production, to be killed and started again."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import msgspec

from millrace.runtime.addresses import open_directly
from millrace.schemas.config import (
    ClickHouseConfig,
    Config,
    KafkaConfig,
    NatsConfig,
    TelemetryConfig,
)
from millrace.telemetry.kafka.embedded import EmbeddedKafka
from tests.support.servers import die_with_parent, free_port
from tests.support.waiting import eventually
from tests.telemetry.stores import NO_REDIS, POLL_S

PASSWORD = "of the store's door"


class TelemetryProcess:
    """Successive incarnations of ``python -m millrace.telemetry`` on one store."""

    def __init__(
        self, directory: Path, nats_url: str, kafka: KafkaConfig, *, batch_interval_s: float = 0.1
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self.port = free_port()
        self.config = Config(
            nats=NatsConfig(url=nats_url),
            kafka=kafka,
            redis=NO_REDIS,
            clickhouse=ClickHouseConfig(
                path=str(directory / "store"), serve_port=self.port, password=PASSWORD
            ),
            telemetry=TelemetryConfig(batch_interval_s=batch_interval_s),
        )
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        return (self._directory / "telemetry.log").read_text(errors="replace")

    def use(self, kafka: EmbeddedKafka) -> None:
        """Use this Kafka from the next start on."""
        servers = KafkaConfig(bootstrap_servers=kafka.bootstrap_servers)
        self.config = msgspec.structs.replace(self.config, kafka=servers)

    def start(self) -> None:
        file = self._directory / "config.yaml"
        file.write_bytes(msgspec.yaml.encode(self.config))
        with (self._directory / "telemetry.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "millrace.telemetry", "--config", str(file)],
                stderr=log,
                stdout=log,
                preexec_fn=die_with_parent,
            )

    async def answers(self) -> None:
        """Wait until it serves."""

        def ready() -> bool:
            assert self._process is not None
            assert self._process.poll() is None, self.log
            with contextlib.suppress(OSError):
                return self._get("/ping") == b"Ok.\n"
            return False

        await eventually(
            lambda: asyncio.to_thread(ready), timeout_s=30, what="telemetry is up", poll_s=POLL_S
        )

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        assert self._process is not None
        self._process.terminate()
        try:
            return self._process.wait(8.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise

    async def sql(self, sql: str) -> str:
        """The result as tab-separated text; empty while the process is unreachable."""
        query = urllib.parse.urlencode({"database": "millrace", "query": sql})
        with contextlib.suppress(OSError):
            return (await asyncio.to_thread(self._get, f"/?{query}")).decode().strip()
        return ""

    def _get(self, path: str) -> bytes:
        request = urllib.request.Request(
            f"{self.url}{path}", headers={"X-ClickHouse-Key": PASSWORD}
        )
        with open_directly(request, timeout_s=5.0) as answer:
            return bytes(answer.read())
