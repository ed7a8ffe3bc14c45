"""The same on a real nats-server, and the process itself."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import nats
import pytest
from nats.aio.msg import Msg

from millrace.bus.api import Bus
from millrace.bus.nats import connect
from millrace.bus.nats.permissions import Part
from millrace.runtime.clock import SystemClock
from millrace.scheduler.intake.served_models import ModelCatalogue
from millrace.scheduler.scheduler import Scheduler
from millrace.schemas.config import NatsConfig
from millrace.schemas.frames import Failed
from tests.scheduler.scripted_worker import ScriptedWorker
from tests.scheduler.world import CONFIG, TENANT_QUEUE, FakeRunningRequests, job, load_fake
from tests.support.servers import NatsServer, die_with_parent
from tests.support.waiting import eventually


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path / "nats")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def config(server: NatsServer) -> NatsConfig:
    return NatsConfig(url=server.url)


@pytest.fixture
async def bus(config: NatsConfig) -> AsyncIterator[Bus]:
    bus = await connect(config, "client", part=Part.SCHEDULER)
    yield bus
    await bus.close()


@pytest.fixture
async def scheduler(config: NatsConfig) -> AsyncIterator[Scheduler]:
    bus = await connect(config, "scheduler", part=Part.SCHEDULER)
    # On the real clock of a busy machine an answer may take a while.
    settings = msgspec.structs.replace(CONFIG, dispatch_timeout_s=2.0, resume_timeout_s=1.0)
    catalogue = ModelCatalogue(["m"], load_fake)
    made = Scheduler(bus, settings, SystemClock(), catalogue, FakeRunningRequests())
    stopping = asyncio.Event()
    running = asyncio.create_task(made.run(stopping))
    await made.ready.wait()
    yield made
    stopping.set()
    await running
    await bus.close()


async def worker_on(config: NatsConfig, name: str, num_slots: int = 4) -> ScriptedWorker:
    bus = await connect(config, name, part=Part.SCHEDULER)
    return await ScriptedWorker(bus, SystemClock(), name, num_slots=num_slots).start()


async def close(*workers: ScriptedWorker) -> None:
    for worker in workers:
        if worker.alive:
            await worker.kill()
        await worker.bus.close()


async def test_late_binding(bus: Bus, config: NatsConfig, scheduler: Scheduler) -> None:
    worker = await worker_on(config, "a", num_slots=2)
    for number in range(6):
        await bus.jobs.publish(job(f"r{number}"))
    await eventually(lambda: len(worker.running) == 2)

    async def window_is_full() -> bool:
        depth = await bus.jobs.depth(TENANT_QUEUE)
        return depth.num_queued == 4 - CONFIG.window_jobs_per_tenant

    await eventually(window_is_full)
    for _ in range(3):
        await eventually(lambda: len(worker.running) == 2)
        await worker.finish_all()

    async def empty() -> bool:
        depth = await bus.jobs.depth(TENANT_QUEUE)
        return depth.num_queued == depth.num_leased == 0

    await eventually(empty)
    assert [dispatch.job.request_id for dispatch in worker.history] == [f"r{n}" for n in range(6)]
    await eventually(lambda: len(scheduler.state.job_table) == 0)
    await close(worker)


async def test_a_dead_worker_s_jobs_go_on(
    bus: Bus, config: NatsConfig, scheduler: Scheduler
) -> None:
    first = await worker_on(config, "a")
    for number in range(4):
        await bus.jobs.publish(job(f"r{number}", reply=""))
    await eventually(lambda: len(first.running) == 4)
    second = await worker_on(config, "b")
    await first.kill()
    await eventually(lambda: len(second.running) == 4, timeout_s=4.0)
    assert {dispatch.epoch for dispatch in second.history} == {2}
    await second.finish_all()
    await close(first, second)


async def test_a_job_of_an_unknown_model_is_answered(
    bus: Bus, config: NatsConfig, scheduler: Scheduler
) -> None:
    frames: list[object] = []
    await bus.frames.subscribe("client", lambda _id, frame: frames.append(frame))
    await bus.jobs.publish(job("r1", model="no such/model"))
    await eventually(lambda: len(frames) == 1)
    assert await bus.jobs.tenant_queues() == {}


@pytest.mark.parametrize("message_id", ["r1", None])
async def test_a_repeated_id_is_answered(
    bus: Bus, config: NatsConfig, scheduler: Scheduler, message_id: str | None
) -> None:
    """A plain NATS client repeats the job, with and without a message id that the server drops."""
    worker = await worker_on(config, "a")
    frames: dict[str, list[dict[str, object]]] = {"other": [], "third": []}
    service = await nats.connect(config.url)

    async def on_frame(message: Msg) -> None:
        _, reply, request_id = message.subject.split(".")
        assert request_id == "r1"
        frames[reply].append(json.loads(message.data))

    async def publish(reply: str, **changes: object) -> bool:
        repeated = msgspec.json.encode(job("r1", reply=reply, **changes))
        headers = {"Content-Type": "application/json"}
        if message_id is not None:
            headers["Nats-Msg-Id"] = message_id
        stored = await service.jetstream().publish("jobs.m.free.local", repeated, headers=headers)
        return bool(stored.duplicate)

    for reply in frames:
        await service.subscribe(f"tok.{reply}.>", cb=on_frame)
    await bus.jobs.publish(job("r1"))
    await eventually(lambda: "r1" in worker.running)
    assert await publish("other") is (message_id is not None)
    assert await publish("third", prompt_token_ids=(9,)) is (message_id is not None)
    await eventually(lambda: len(frames["third"]) == 1 and len(worker.replays) == 1)
    assert (frames["third"][0]["type"], frames["third"][0]["code"]) == ("failed", "duplicate")
    replay = worker.replays[0]
    assert (replay.reply, replay.from_index, replay.frames_as_json) == ("other", 0, True)
    assert list(worker.running) == ["r1"]
    await worker.finish("r1")

    async def is_empty() -> bool:
        return await bus.jobs.tenant_queues() == {}

    await eventually(is_empty)
    assert len(worker.history) == 1
    await service.close()
    await close(worker)


async def test_a_corrected_job_may_have_the_id_of_a_malformed_one(
    bus: Bus, config: NatsConfig, scheduler: Scheduler
) -> None:
    worker = await worker_on(config, "a")
    frames: list[object] = []
    await bus.frames.subscribe("client", lambda _id, frame: frames.append(frame))
    service = await nats.connect(config.url)
    headers = {"Content-Type": "application/json", "Nats-Msg-Id": "r1"}
    wrong = {"request_id": "r1", "model": "m", "reply": "client", "store_result": True}
    right = {**wrong, "prompt": "x"}
    await service.jetstream().publish("jobs.m.free", json.dumps(wrong).encode(), headers=headers)
    await eventually(lambda: len(frames) == 1)
    assert isinstance(frames[0], Failed)
    assert "free" in frames[0].message
    stored = await service.jetstream().publish(
        "jobs.m.free", json.dumps(right).encode(), headers=headers
    )
    assert stored.duplicate
    await eventually(lambda: "r1" in worker.running)
    refused = await bus.results.fetch("local", "r1")
    assert refused is not None
    assert refused.is_of_no_job
    done = msgspec.structs.replace(refused, status="done", error_code="", error_message="")
    await bus.results.store(done)
    assert await bus.results.fetch("local", "r1") == done
    await bus.results.store(refused)
    assert await bus.results.fetch("local", "r1") == done
    await service.close()
    await close(worker)


async def test_the_queue_says_what_is_open(bus: Bus, config: NatsConfig) -> None:
    published = await bus.jobs.publish(job("r1"))
    assert await bus.jobs.is_open(published.stream_sequence)
    assert await bus.jobs.tenant_queues() == {TENANT_QUEUE: 1}
    (leased,) = await bus.jobs.pull(TENANT_QUEUE, 1, 2.0)
    assert await bus.jobs.is_open(published.stream_sequence)
    await bus.jobs.ack(leased.lease)
    assert not await bus.jobs.is_open(published.stream_sequence)
    assert await bus.jobs.tenant_queues() == {}


async def test_a_restart_of_the_server_loses_nothing(
    server: NatsServer, bus: Bus, config: NatsConfig, scheduler: Scheduler
) -> None:
    worker = await worker_on(config, "a", num_slots=8)
    for number in range(4):
        await bus.jobs.publish(job(f"r{number}", reply=""))
    await eventually(lambda: len(worker.running) == 4)
    server.kill()
    await asyncio.sleep(0)
    server.start()
    await eventually(lambda: bus.connected and scheduler.state.bus.connected)
    for number in range(4, 8):
        await bus.jobs.publish(job(f"r{number}", reply=""))
    await eventually(lambda: len(worker.running) == 8)

    async def all_answered() -> bool:
        await worker.finish_all()
        depth = await bus.jobs.depth(TENANT_QUEUE)
        return depth.num_queued == depth.num_leased == 0

    await eventually(all_answered, timeout_s=15.0)
    runs = [(dispatch.job.request_id, dispatch.epoch) for dispatch in worker.history]
    assert len(runs) == len(set(runs))
    await eventually(lambda: len(scheduler.state.job_table) == 0)
    await close(worker)


async def test_the_process_starts_and_stops(server: NatsServer, bus: Bus, tmp_path: Path) -> None:
    statuses: list[object] = []
    await bus.control.subscribe_queue_status(statuses.append)
    environment = {
        **os.environ,
        "MILLRACE_NATS__URL": server.url,
        "MILLRACE_REDIS__URL": "redis://127.0.0.1:1/0",
    }
    command = [sys.executable, "-m", "millrace.scheduler"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stderr=log, preexec_fn=die_with_parent)
    try:
        await eventually(lambda: len(statuses) > 2, timeout_s=20.0)
        process.send_signal(signal.SIGTERM)
        await eventually(lambda: process.poll() is not None, timeout_s=2.0)
        assert process.returncode == 0, (tmp_path / "log").read_text()
    finally:
        process.kill()
        process.wait()


def test_a_bad_configuration_is_one_sentence() -> None:
    environment = {**os.environ, "MILLRACE_SCHEDULER__NONSENSE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "millrace.scheduler"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("scheduler: MILLRACE_SCHEDULER__NONSENSE")
    assert len(done.stderr.strip().splitlines()) == 1
