"""Jobs that wait for a gateway that is gone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from decimal import Decimal

import pytest

from millrace.bus.memory import MemoryBus
from millrace.schemas.frames import Cancelled, Done
from millrace.schemas.jobs import Job, Source
from millrace.schemas.records import Status
from tests.scheduler.world import World, job

GRACE_S = 8.0


@pytest.fixture
async def orphaning() -> AsyncIterator[World]:
    made = World(orphan_grace_s=GRACE_S)
    await made.open()
    try:
        yield made
    finally:
        await made.close()


def _of_gateway(request_id: str, **changes: object) -> Job:
    return job(request_id, source=Source.HTTP, **changes)


async def test_a_waiting_job_ends_with_its_gateway(orphaning: World) -> None:
    """Jobs of a live gateway, of services, and with stored results stay in the queue."""
    world = orphaning
    worker = await world.add_worker(num_slots=1)
    await world.client.jobs.publish(_of_gateway("running"), reserved=True)
    await world.until(lambda: "running" in worker.running)
    gateway = await MemoryBus(world.broker).control.serve_resume_points(
        "client", lambda _: None, {"running", "lives", "orphan"}.__contains__
    )
    other = MemoryBus(world.broker).control
    await other.serve_resume_points("other", lambda _: None, {"lives"}.__contains__)
    waiting = {
        "orphan": _of_gateway("orphan"),
        "kept": _of_gateway("kept", store_result=True),
        "lives": _of_gateway("lives", reply="other"),
    }
    for one in waiting.values():
        await world.client.jobs.publish(one, reserved=True)
    await world.client.jobs.publish(job("service"))
    await world.until(lambda: len(world.schedulers[0].state.job_table) >= 3)
    await world.pass_s(2 * GRACE_S)
    assert world.terminal("orphan") is None
    await gateway.close()
    await world.until(lambda: world.terminal("orphan") is not None, within_s=3 * GRACE_S)
    assert world.terminal("orphan") == Cancelled(epoch=1, reason="orphaned")
    record = world.record("orphan")
    assert record is not None
    assert (record.status, record.error_code) == (Status.CANCELLED, "orphaned")
    assert (record.completion_tokens, record.cost) == (0, Decimal(0))
    for name in ("kept", "lives", "service"):
        assert world.terminal(name) is None
    # What runs is its worker's to end.
    assert list(worker.running) == ["running"]
    assert not isinstance(world.terminal("running"), Done)
