"""nats-server is started again when that helps, and only then."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.bus.memory import MemoryBroker, MemoryBus
from millrace.cli.local.store_recovery import StoreRecovery, with_folders
from millrace.cli.local.supervisor import StartError
from millrace.schemas.config import StorageConfig
from tests.support.manual_clock import ManualClock


class FakeSystem:
    """A stack whose nats-server is in memory."""

    def __init__(self, config: StorageConfig) -> None:
        self.broker, self.clock = MemoryBroker(), ManualClock()
        self.restarted: list[str] = []
        self.said: list[str] = []
        storage = MemoryBus(self.broker).storage
        self.recovery = StoreRecovery(config, storage, self._restart, self.clock, self.said.append)

    async def _restart(self, name: str) -> None:
        self.restarted.append(name)


async def test_a_server_that_gave_streams_up_is_started_again_once_there_is_room(
    tmp_path: Path,
) -> None:
    system = FakeSystem(with_folders(StorageConfig(min_free_bytes=1), tmp_path))
    await system.recovery.check()
    assert system.restarted == []
    system.broker.failed_streams["RESULTS"] = "no space left on device"
    await system.recovery.check()
    await system.recovery.check()
    assert system.restarted == ["nats"], "the second check gives it the time to come back"
    [sentence] = system.said
    assert sentence.startswith("nats gave its streams RESULTS up (no space left on device)")
    await system.clock.advance(6.0)
    await system.recovery.check()
    assert system.restarted == ["nats", "nats"]
    system.broker.start()
    await system.clock.advance(60.0)
    await system.recovery.check()
    assert len(system.restarted) == 2


async def test_it_is_left_alone_while_there_is_no_room() -> None:
    full = StorageConfig(nats_dir="/", min_free_bytes=1 << 60)
    system = FakeSystem(full)
    system.broker.failed_streams["JOBS"] = "no space left on device"
    await system.recovery.check()
    assert system.restarted == []


def test_nothing_is_started_on_a_disk_without_room(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"MiB free, and nothing is accepted with less than"):
        with_folders(StorageConfig(min_free_bytes=1 << 60), tmp_path)
