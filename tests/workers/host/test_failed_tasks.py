"""Worker with a failed task: its leases are released, and it starts again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from millrace.bus import nats
from millrace.bus.nats.permissions import Part
from millrace.registry.served import ServedModel
from millrace.runtime.faults.failures import MAX_FAILURES, PartFailedError
from millrace.schemas.config import Config, EngineConfig, NatsConfig, RedisConfig, WorkerConfig
from millrace.schemas.control import WorkerStatus
from millrace.schemas.engines import EngineKind
from millrace.workers.__main__ import serve
from millrace.workers.host.requests import Requests
from tests.support.engine.checkpoints_made import write_checkpoint
from tests.support.servers import free_port
from tests.support.waiting import eventually
from tests.workers.scripted import bench, line_of


async def test_leases_of_a_failed_worker_are_released(
    demo: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("unable to perform operation on <TCPTransport closed=True>")

    async with bench(demo) as b:
        assert (await b.dispatch()).ok
        b.engine.emit("r1:1", [20])
        await b.settle(0.1)
        monkeypatch.setattr(b.worker.requests, "expire_late", fail)
        assert b.run is not None
        await b.settle(1.0)
        with pytest.raises(ExceptionGroup) as caught:
            await b.run
        assert caught.group_contains(RuntimeError)
        # At once, not when the lease lapses.
        [leased] = await b.peer.jobs.pull(line_of(b.job()), 1, 0.0)
        assert (leased.job.request_id, leased.num_deliveries) == ("r1", 2)
        assert b.engine.cancelled == ["r1:1"]
        assert b.statuses[-1].retired


class Failing:
    """Worker of a process whose watch fails as often as a test says."""

    def __init__(self) -> None:
        self.num_to_fail = 0
        self.statuses: list[WorkerStatus] = []

    def lives(self) -> list[str]:
        return list(dict.fromkeys(status.worker_id for status in self.statuses))


@pytest.fixture
async def failing(
    nats_config: NatsConfig, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Failing]:
    made = Failing()
    expire_late = Requests.expire_late

    def expire(requests: Requests) -> None:
        if made.num_to_fail:
            made.num_to_fail -= 1
            raise RuntimeError("unforeseen")
        expire_late(requests)

    monkeypatch.setattr(Requests, "expire_late", expire)
    bus = await nats.connect(nats_config, "test", part=Part.SCHEDULER)
    await bus.workers.watch(made.statuses.append)
    yield made
    await bus.close()


def config_of(nats_config: NatsConfig, folder: Path) -> Config:
    engine = EngineConfig(kind=EngineKind.SIMULATED)
    checkpoint = write_checkpoint(folder / "tiny", max_position_embeddings=4096)
    return Config(
        nats=nats_config,
        redis=RedisConfig(url=f"redis://127.0.0.1:{free_port()}/0"),
        worker=WorkerConfig(name="w1", model=str(checkpoint), engine=engine),
    )


async def test_failed_worker_starts_again(
    failing: Failing, nats_config: NatsConfig, tmp_path: Path
) -> None:
    serving = asyncio.create_task(serve(config_of(nats_config, tmp_path)))
    await eventually(lambda: len(failing.lives()) == 1)
    failing.num_to_fail = 1
    await eventually(lambda: len(failing.lives()) == 2)
    await eventually(lambda: not failing.statuses[-1].retired)
    assert not serving.done()
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


async def test_after_five_failures_it_ends(
    failing: Failing, nats_config: NatsConfig, tmp_path: Path
) -> None:
    serving = asyncio.create_task(serve(config_of(nats_config, tmp_path)))
    await eventually(lambda: len(failing.lives()) == 1)
    failing.num_to_fail = MAX_FAILURES
    with pytest.raises(PartFailedError):
        await asyncio.wait_for(serving, 30.0)
    assert failing.num_to_fail == 0
    assert len(failing.lives()) == MAX_FAILURES
