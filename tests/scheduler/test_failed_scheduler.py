"""Scheduler with a failed loop: the process builds it anew."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from millrace.bus import nats
from millrace.bus.nats.permissions import Part
from millrace.runtime.faults.failures import MAX_FAILURES, PartFailedError
from millrace.scheduler.__main__ import serve
from millrace.scheduler.stages.watch import HealthMonitor
from millrace.schemas.config import Config, NatsConfig, RedisConfig, SchedulerConfig
from tests.support.engine.checkpoints_made import write_checkpoint
from tests.support.servers import free_port
from tests.support.waiting import eventually


class Failing:
    """The health monitor of every scheduler of this process; ``fail`` has the present one fail."""

    def __init__(self) -> None:
        self.lives: list[asyncio.Event] = []

    async def run(self, _monitor: HealthMonitor) -> None:
        self.lives.append(asyncio.Event())
        await self.lives[-1].wait()
        raise AttributeError("'NoneType' object has no attribute 'worker_id'")

    def fail(self) -> None:
        self.lives[-1].set()


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Failing:
    told = Failing()
    monkeypatch.setattr(HealthMonitor, "run", lambda monitor: told.run(monitor))
    return told


@pytest.fixture
def config(nats_config: NatsConfig, tmp_path: Path) -> Config:
    checkpoint = write_checkpoint(tmp_path / "tiny", max_position_embeddings=4096)
    return Config(
        nats=nats_config,
        redis=RedisConfig(url=f"redis://127.0.0.1:{free_port()}/0"),
        scheduler=SchedulerConfig(models=(str(checkpoint),)),
    )


async def test_a_failed_scheduler_starts_again(failing: Failing, config: Config) -> None:
    models: list[str] = []
    bus = await nats.connect(config.nats, "test", part=Part.SCHEDULER)
    await bus.control.subscribe_queue_status(lambda status: models.append(status.model))
    serving = asyncio.create_task(serve(config))
    await eventually(lambda: bool(models))
    failing.fail()
    await eventually(lambda: len(failing.lives) == 2)
    models.clear()
    await eventually(lambda: bool(models))
    assert not serving.done()
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    await bus.close()


async def test_the_process_ends_after_five_failures(failing: Failing, config: Config) -> None:
    serving = asyncio.create_task(serve(config))
    for number in range(MAX_FAILURES):
        await eventually(lambda count=number + 1: len(failing.lives) == count)
        failing.fail()
    with pytest.raises(PartFailedError):
        await asyncio.wait_for(serving, 30.0)
    assert len(failing.lives) == MAX_FAILURES
