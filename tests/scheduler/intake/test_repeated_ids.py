"""A request id that a service publishes again, past what the server takes for a duplicate."""

from __future__ import annotations

import msgspec
import pytest

from millrace.bus import subjects
from millrace.bus.job_queue import TenantQueue
from millrace.bus.memory.jobs import MemoryJobQueue
from millrace.bus.running_requests import RunningRequest
from millrace.schemas.frames import Failed, Frame
from millrace.schemas.jobs import Job
from millrace.schemas.records import Status
from tests.scheduler.world import World, job


def publish(world: World, repeated: Job, *, reserved: bool = False) -> None:
    """As a service does that sends no Nats-Msg-Id."""
    queue = world.client.jobs
    assert isinstance(queue, MemoryJobQueue)
    subject = subjects.job(TenantQueue.of(repeated, reserved=reserved))
    queue.publish_raw(subject, msgspec.json.encode(repeated), None, "")


async def listen(world: World, reply: str) -> list[Frame]:
    frames: list[Frame] = []
    await world.client.frames.subscribe(reply, lambda _, frame: frames.append(frame))
    return frames


def is_duplicate(frame: Frame) -> bool:
    return isinstance(frame, Failed) and (frame.code, frame.epoch) == ("duplicate", 0)


async def test_while_the_first_runs(world: World) -> None:
    worker = await world.add_worker()
    publish(world, job("r1"))
    await world.until(lambda: "r1" in worker.running)
    others = await listen(world, "other")
    publish(world, job("r1", reply="other", store_result=True))
    await world.until(lambda: len(others) == 1)
    assert is_duplicate(others[0])
    assert await world.client.results.fetch("local", "r1") is not None
    # The first knows nothing of it.
    assert "r1" in worker.running
    assert world.terminal("r1") is None
    await worker.finish("r1")
    await world.until(lambda: world.terminal("r1") is not None and world.num_stored == 0)
    assert len(worker.history) == 1
    record = world.record("r1")
    assert record is not None
    assert record.status is Status.DONE


async def test_the_same_listener_gets_what_the_first_sends(world: World) -> None:
    worker = await world.add_worker()
    publish(world, job("r1"))
    await world.until(lambda: "r1" in worker.running)
    publish(world, job("r1"))
    await world.until(lambda: world.num_stored == 1)
    await world.pass_s(1.0)
    assert world.frames_of("r1") == []
    await worker.finish("r1")
    await world.until(lambda: world.terminal("r1") is not None)


@pytest.mark.parametrize("finished", [True, False])
async def test_when_the_index_knows_the_first(world: World, finished: bool) -> None:
    """It was answered, or runs in another scheduler's hands."""
    worker = await world.add_worker()
    # With a job before it, so that the queue is known to count its deliveries.
    publish(world, job("r0"))
    await world.until(lambda: "r0" in worker.running)
    known = RunningRequest(worker_id="w-0", epoch=3, finished=finished)
    world.running_requests.known["r1"] = known
    publish(world, job("r1", store_result=True))
    await world.until(lambda: world.terminal("r1") is not None)
    (frame,) = world.frames_of("r1")
    assert is_duplicate(frame)
    result = await world.client.results.fetch("local", "r1")
    assert (result is not None and result.error_code == "duplicate") is finished
    assert list(worker.running) == ["r0"]
    assert world.running_requests.known["r1"] == known
    assert world.record("r1") is None
    await world.until(lambda: world.num_stored == 1)


async def test_after_the_first_nobody_knows_of(world: World) -> None:
    """Its entry in the index has expired: it runs."""
    worker = await world.add_worker()
    publish(world, job("r1"))
    await world.until(lambda: "r1" in worker.running)
    await worker.finish("r1")
    await world.until(lambda: world.num_stored == 0)
    world.running_requests.known.clear()
    publish(world, job("r1", reply="other"))
    await world.until(lambda: "r1" in worker.running)


async def test_a_stranger_s_repetition_tells_no_stranger(world: World) -> None:
    worker = await world.add_worker()
    publish(world, job("r1", tenant="a", reply="a"))
    await world.until(lambda: "r1" in worker.running)
    own, foreign = await listen(world, "b/svc"), await listen(world, "a")
    publish(world, job("r1", tenant="b", reply="a"))
    publish(world, job("r1", tenant="b", reply="b/svc"))
    await world.until(lambda: len(own) == 1)
    assert is_duplicate(own[0])
    assert world.num_stored <= 2
    assert foreign == []
    assert "r1" in worker.running


async def test_a_gateway_s_jobs_are_not_looked_up(world: World) -> None:
    worker = await world.add_worker()
    publish(world, job("r0"), reserved=True)
    await world.until(lambda: "r0" in worker.running)
    world.running_requests.known["r1"] = RunningRequest(worker_id="w-0", epoch=1, finished=True)
    publish(world, job("r1"), reserved=True)
    await world.until(lambda: "r1" in worker.running)
