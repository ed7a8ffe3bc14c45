"""Late or missing Kafka and telemetry: the messages about them, and further attempts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from millrace.cli.endpoints import Endpoints
from millrace.cli.local.live import SystemState
from millrace.cli.local.private_files import make_private
from millrace.cli.local.records import kafka_servers
from millrace.cli.local.records.kafka_servers import StandIn
from millrace.cli.local.records.record_keeping import TELEMETRY, RecordKeeping
from millrace.cli.local.supervisor import Process, Supervisor
from millrace.schemas.config import Config
from tests.support.manual_clock import ManualClock
from tests.support.waiting import eventually

_WAITS = "import time; time.sleep(600)"
_KAFKA = f"import sys; open(sys.argv[-1], 'w').write('127.0.0.1:9'); {_WAITS}"


class Machine:
    """Supervisor on a folder, with its messages and files."""

    def __init__(self, folder: Path) -> None:
        self.said: list[str] = []
        self.config = Config()
        self.state = SystemState()
        self.run_dir = folder / "run"
        self.supervisor = Supervisor(self.run_dir, folder / "logs", self.said.append)
        self.clock = ManualClock()
        self.is_up = folder / "telemetry is up"
        self.endpoints: list[Endpoints] = []
        self.records = RecordKeeping(
            self.supervisor,
            self.state,
            lambda: self.config,
            self._write,
            self.endpoints.append,
            self.clock,
            self.said.append,
        )

    def _write(self, config: Config) -> None:
        self.config = config

    def start(self, telemetry: Process) -> None:
        self.records.start(StandIn(self.run_dir), telemetry)

    def telemetry(self, code: str = _WAITS) -> Process:
        async def ready() -> bool:
            return self.is_up.exists()

        return Process(name=TELEMETRY, command=[sys.executable, "-c", code], ready=ready)

    async def close(self) -> None:
        await self.records.close()
        await self.supervisor.stop(5.0)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    def command(_module: str, *arguments: str) -> Sequence[str]:
        return [sys.executable, "-c", _KAFKA, *arguments]

    monkeypatch.setattr(kafka_servers, "python_command", command)
    return Machine(tmp_path)


async def test_telemetry_that_is_ready_in_time_is_not_mentioned(machine: Machine) -> None:
    machine.is_up.touch()
    machine.start(machine.telemetry())
    await machine.records.wait(60.0)
    assert machine.records.why_not_ready == ""
    assert machine.said == []
    assert machine.config.kafka.bootstrap_servers == "127.0.0.1:9"
    await machine.close()


async def test_telemetry_that_is_late_is_named_and_announced(machine: Machine) -> None:
    machine.start(machine.telemetry())
    await eventually(lambda: "kafka" in machine.state.addresses)
    await machine.records.wait(0.0)
    assert machine.records.why_not_ready == (
        "Telemetry is not ready yet: telemetry-1 is still starting. Requests are served "
        "meanwhile, and their records wait in NATS."
    )
    machine.is_up.touch()
    await eventually(lambda: machine.said == ["Telemetry is ready."])
    assert machine.records.why_not_ready == ""
    await machine.close()


async def test_a_folder_that_telemetry_cannot_have_is_named(
    machine: Machine, tmp_path: Path
) -> None:
    folder = tmp_path / "clickhouse"
    folder.touch()
    machine.is_up.touch()
    machine.start(replace(machine.telemetry(), before_start=lambda: make_private(folder)))
    await machine.records.wait(60.0)
    [message] = machine.said
    assert str(folder) in message
    assert message.endswith("It is started again in 5 s.")
    folder.unlink()
    await machine.clock.advance(5.0)
    await eventually(lambda: machine.said[1:] == ["Telemetry is ready."])
    await machine.close()


async def test_telemetry_that_cannot_start_says_why_and_is_tried_again(
    machine: Machine, tmp_path: Path
) -> None:
    mended = tmp_path / "mended"
    broken = f"import os; os.path.exists({str(mended)!r}) or exit('the store is broken')\n{_WAITS}"
    machine.start(machine.telemetry(broken))
    await machine.records.wait(60.0)
    [message] = machine.said
    assert "telemetry-1 ended with exit code 1 before it was ready: the store is broken" in message
    assert message.endswith(
        "Requests are served meanwhile, and their records wait in NATS. It is started again in 5 s."
    )
    await machine.clock.advance(5.0)
    await eventually(lambda: len(machine.said) == 2)
    assert machine.said[1].endswith("It is started again in 10 s.")
    mended.touch()
    machine.is_up.touch()
    await machine.clock.advance(10.0)
    await eventually(lambda: machine.said[2:] == ["Telemetry is ready."])
    await machine.close()
