"""Request ids that a service publishes again, after the server's window for duplicates."""

from __future__ import annotations

import msgspec
import pytest

from millrace.bus import subjects
from millrace.bus.job_queue import TenantQueue
from millrace.bus.memory.jobs import MemoryJobQueue
from millrace.bus.running_requests import JobClaim, RunningRequest
from millrace.bus.transport import Subscription
from millrace.schemas.control import Replay
from millrace.schemas.errors import BusForbiddenError
from millrace.schemas.frames import (
    Delta,
    Done,
    Expired,
    Failed,
    FinishReason,
    Frame,
    Started,
    Usage,
)
from millrace.schemas.jobs import Job, JobResult
from millrace.schemas.records import Status
from tests.scheduler.world import World, job


def publish(world: World, repeated: Job, *, reserved: bool = False) -> None:
    """Publish a job without a Nats-Msg-Id, as some services do."""
    queue = world.client.jobs
    assert isinstance(queue, MemoryJobQueue)
    subject = subjects.job(TenantQueue.of(repeated, reserved=reserved))
    queue.publish_raw(subject, msgspec.json.encode(repeated), None, "")


async def listen(world: World, reply: str) -> list[Frame]:
    frames: list[Frame] = []
    await world.client.frames.subscribe(reply, lambda _, frame: frames.append(frame))
    return frames


def is_duplicate(frame: Frame, epoch: int = 0) -> bool:
    return isinstance(frame, Failed) and (frame.code, frame.epoch) == ("duplicate", epoch)


async def test_the_same_job_for_another_reader_gets_the_answer(world: World) -> None:
    worker = await world.add_worker()
    publish(world, job("r1"))
    await world.until(lambda: "r1" in worker.running)
    others = await listen(world, "other")
    publish(world, job("r1", reply="other", store_result=True, frames_as_json=True))
    await world.until(lambda: len(worker.replays) == 1)
    replay = Replay(
        request_id="r1", from_index=0, reply="other", frames_as_json=True, batch_frames=False
    )
    assert worker.replays == [replay]
    # The first knows nothing of it.
    assert world.terminal("r1") is None
    await worker.finish("r1")
    await world.until(lambda: world.terminal("r1") is not None and world.num_stored == 0)
    assert [type(frame) for frame in others] == [Done]
    assert len(worker.history) == len(worker.replays) == 1
    record = world.record("r1")
    assert record is not None
    assert record.status is Status.DONE


async def test_another_job_under_the_same_id_is_refused(world: World) -> None:
    worker = await world.add_worker()
    publish(world, job("r1"))
    await world.until(lambda: "r1" in worker.running)
    others = await listen(world, "other")
    publish(world, job("r1", reply="other", prompt_token_ids=(9,), store_result=True))
    await world.until(lambda: len(others) == 1)
    assert is_duplicate(others[0])
    assert worker.replays == []
    # The first may store one yet.
    assert await world.client.results.fetch("local", "r1") is None


async def test_a_message_id_that_was_used_before(world: World) -> None:
    """The server drops it, and a scheduler stores it anew."""
    worker = await world.add_worker()
    await world.client.jobs.publish(job("r1"))
    await world.until(lambda: "r1" in worker.running)
    others = await listen(world, "other")
    published = await world.client.jobs.publish(job("r1", reply="other"))
    assert published.duplicate
    await world.until(lambda: len(worker.replays) == 1)
    await worker.finish("r1")
    await world.until(lambda: len(others) == 1 and world.num_stored == 0)
    assert isinstance(others[0], Done)
    # A copy for the first reader, who has the end: its result is not kept, so that is said.
    await world.running_requests.finish("r1", worker.worker_id, 1)
    await world.client.jobs.publish(job("r1"))
    await world.until(lambda: len(world.frames_of("r1")) == 2 and world.num_stored == 0)
    assert is_duplicate(world.frames_of("r1")[1], epoch=1)
    assert len(worker.history) == 1


async def test_permissions_of_an_earlier_version_stop_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler without the permission cannot see dropped jobs, and runs all others."""

    async def refuse(_queue: MemoryJobQueue) -> Subscription:
        raise BusForbiddenError("jobs.*.*")

    monkeypatch.setattr(MemoryJobQueue, "recover_dropped", refuse)
    await world.stop_scheduler()
    await world.add_scheduler()
    worker = await world.add_worker()
    publish(world, job("r1"))
    await world.until(lambda: "r1" in worker.running)


async def test_the_end_of_a_job_that_no_worker_ends(world: World) -> None:
    """The reader has frames of the dead worker and receives a terminal frame."""
    deadline_ns = world.clock.now_ns() + 5_000_000_000
    worker = await world.add_worker()
    publish(world, job("r1", deadline_ns=deadline_ns, store_result=True))
    await world.until(lambda: "r1" in worker.running)
    others = await listen(world, "other")
    publish(world, job("r1", reply="other", deadline_ns=deadline_ns))
    await world.until(lambda: len(worker.replays) == 1)
    await worker.kill()
    await world.until(lambda: world.terminal("r1") is not None)
    await world.until(lambda: len(others) > 0 and world.num_stored == 0)
    assert isinstance(world.terminal("r1"), Expired)
    assert isinstance(others[-1], Expired)


async def test_a_repeated_job_waits_for_the_first_and_follows_it(world: World) -> None:
    publish(world, job("r1"))
    publish(world, job("r1", reply="other"))
    others = await listen(world, "other")
    await world.pass_s(3.0)
    assert others == []
    first = await world.add_worker("a")
    await world.until(lambda: len(first.replays) == 1)
    second = await world.add_worker("b")
    await first.kill()
    await world.until(lambda: len(second.replays) == 1)
    await second.finish("r1")
    await world.until(lambda: len(others) == 1 and world.num_stored == 0)
    assert isinstance(others[0], Done)


async def test_a_repeated_job_survives_its_scheduler(world: World) -> None:
    worker = await world.add_worker()
    publish(world, job("r1"))
    await world.until(lambda: "r1" in worker.running)
    others = await listen(world, "other")
    publish(world, job("r1", reply="other"))
    await world.until(lambda: len(worker.replays) == 1)
    await world.kill_scheduler()
    await world.add_scheduler()
    world.running_requests.known["r1"] = RunningRequest(
        worker_id=worker.worker_id, epoch=1, finished=False
    )
    await world.until(lambda: len(worker.replays) == 2)
    await worker.finish("r1")
    await world.until(lambda: len(others) > 0)
    assert isinstance(others[0], Done)
    assert len(worker.history) == 1


async def test_the_stored_result_is_its_answer(world: World) -> None:
    worker = await world.add_worker()
    publish(world, job("r1", store_result=True))
    await world.until(lambda: "r1" in worker.running)
    await world.client.results.store(
        JobResult(
            request_id="r1",
            tenant="local",
            model="m",
            status="done",
            text="hi",
            token_ids=(5,),
            finish_reason=FinishReason.STOP,
        )
    )
    await worker.finish("r1")
    await world.running_requests.finish("r1", worker.worker_id, 1)
    await world.until(lambda: world.num_stored == 0)
    others = await listen(world, "other")
    publish(world, job("r1", reply="other"))
    await world.until(lambda: world.num_stored == 0 and len(others) == 4)
    assert [type(frame) for frame in others] == [Started, Delta, Usage, Done]


async def test_few_may_follow_one_job(world: World) -> None:
    """A worker keeps four readers of a request; further readers are refused."""
    worker = await world.add_worker()
    publish(world, job("r1"))
    await world.until(lambda: "r1" in worker.running)
    readers = [await listen(world, f"other-{number}") for number in range(4)]
    for number in range(4):
        publish(world, job("r1", reply=f"other-{number}"))
    await world.until(lambda: len(worker.replays) == 3 and any(readers))
    await worker.finish("r1")
    await world.until(lambda: all(readers) and world.num_stored == 0)
    assert sorted(is_duplicate(frame) for (frame,) in readers) == [False, False, False, True]


async def test_the_claim_of_a_job_that_was_lost_is_void(world: World) -> None:
    worker = await world.add_worker()
    world.running_requests.claims["r1"] = JobClaim(sequence=7_000, digest="x", tenant="local")
    publish(world, job("r1"))
    await world.until(lambda: "r1" in worker.running)


async def test_a_corrected_job_runs_under_the_id_of_a_malformed_one(world: World) -> None:
    worker = await world.add_worker()
    queue = world.client.jobs
    assert isinstance(queue, MemoryJobQueue)
    wrong = {"request_id": "r1", "model": "m", "reply": "client", "store_result": True}
    queue.publish_raw("jobs.m.free.local", msgspec.json.encode(wrong), None, "r1")
    await world.until(lambda: world.terminal("r1") is not None)
    refused = await world.client.results.fetch("local", "r1")
    assert refused is not None
    assert refused.error_code == "malformed_message"
    published = queue.publish_raw(
        "jobs.m.free.local", msgspec.json.encode({**wrong, "prompt": "x"}), None, "r1"
    )
    assert published.duplicate
    await world.until(lambda: "r1" in worker.running)
    done = JobResult(request_id="r1", tenant="local", model="m", status="done", text="hi")
    await world.client.results.store(done)
    assert await world.client.results.fetch("local", "r1") == done
    await world.client.results.store(refused)
    assert await world.client.results.fetch("local", "r1") == done


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
async def test_a_repeated_job_is_refused_if_the_index_knows_the_first(
    world: World, finished: bool
) -> None:
    """The first job was answered, or it runs at another scheduler."""
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


async def test_a_repeated_job_runs_if_the_index_has_expired(world: World) -> None:
    """The index entry of the first job has expired, so the repeated job runs."""
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
