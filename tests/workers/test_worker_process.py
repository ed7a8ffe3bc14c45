"""``python -m workers`` on a real nats-server, with the real engine on a tiny checkpoint."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from bus import nats
from bus.api import Bus, Line
from bus.codec import RECORD
from schemas.config import NatsConfig
from schemas.control import Cancel, Dispatch, Replay, WorkerCommand, WorkerReply, WorkerStatus
from schemas.frames import TERMINAL_FRAMES, Cancelled, Delta, Done, FinishReason, Frame, Usage
from schemas.jobs import Job, Tier
from schemas.records import RequestRecord, Status
from schemas.sampling import Grammar, GrammarKind, SamplingParams
from tests.support.checkpoints_made import write_checkpoint
from tests.support.servers import free_port
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(120)

_ROOT = Path(__file__).resolve().parents[2]
_NUM_BLOCKS = 64
_LINE = Line("tiny", Tier.FREE, "local")


class _Process:
    """A worker's process and its log."""

    def __init__(self, folder: Path, nats_url: str, **worker: object) -> None:
        self.checkpoint = write_checkpoint(folder / "tiny", max_position_embeddings=4096)
        settings = {
            "nats": {"url": nats_url},
            "redis": {"url": f"redis://127.0.0.1:{free_port()}/0"},
            "worker": {
                "name": "w1",
                "model": str(self.checkpoint),
                "engine": {"num_blocks": _NUM_BLOCKS, "num_threads": 1, "device": "cpu"},
                **worker,
            },
        }
        config = folder / "config.yaml"
        config.write_text(yaml.safe_dump(settings))
        self.log = folder / "worker.log"
        with self.log.open("wb") as log:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "workers", "--config", str(config)],
                stdout=log,
                stderr=log,
                cwd=_ROOT,
            )

    def engine(self) -> psutil.Process:
        (child,) = psutil.Process(self.popen.pid).children()
        return child

    def engine_pid(self) -> int | None:
        children = psutil.Process(self.popen.pid).children()
        return children[0].pid if children else None

    def stop(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait()


class _Scheduler:
    """Stands in for scheduler and gateway: dispatches by hand and collects what streams back."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.statuses: list[WorkerStatus] = []
        self.frames: dict[str, list[Frame]] = {}

    @property
    def worker(self) -> WorkerStatus:
        return self.statuses[-1]

    def on_frame(self, request_id: str, frame: Frame) -> None:
        self.frames.setdefault(request_id, []).append(frame)

    def tokens(self, request_id: str) -> list[int]:
        return [
            token
            for frame in self.frames.get(request_id, [])
            if isinstance(frame, Delta)
            for token in frame.token_ids
        ]

    def end(self, request_id: str) -> Frame | None:
        frames = self.frames.get(request_id, [])
        return frames[-1] if frames and isinstance(frames[-1], TERMINAL_FRAMES) else None

    async def command(self, command: WorkerCommand) -> WorkerReply:
        reply = await self.bus.control.command(self.worker.worker_id, command, 5.0)
        assert reply is not None
        return reply

    async def dispatch(self, request_id: str, max_tokens: int, **sampling: Any) -> None:
        job = Job(
            request_id=request_id,
            model="tiny",
            prompt_token_ids=(10, 20, 30),
            sampling=SamplingParams(
                max_tokens=max_tokens, temperature=1.0, seed=3, ignore_eos=True, **sampling
            ),
            reply="gw",
            batch_frames=True,
        )
        await self.bus.jobs.publish(job)
        (leased,) = await self.bus.jobs.pull(_LINE, 1, 5.0)
        reply = await self.command(Dispatch(job=leased.job, epoch=1, lease=leased.lease))
        assert reply.ok, reply

    async def records(self) -> list[RequestRecord]:
        pulled = await self.bus.outbox.pull(1000, 1.0)
        await self.bus.outbox.ack(pulled)
        items = [RECORD.decode(message.payload) for message in pulled]
        return [item for item in items if isinstance(item, RequestRecord)]


@asynccontextmanager
async def _scheduler(config: NatsConfig) -> AsyncIterator[_Scheduler]:
    bus = await nats.connect(config, "test")
    scheduler = _Scheduler(bus)
    await bus.frames.subscribe("gw", scheduler.on_frame)
    await bus.workers.watch(scheduler.statuses.append)
    try:
        yield scheduler
    finally:
        await bus.close()


@pytest.fixture
def worker(tmp_path: Path, nats_config: NatsConfig) -> Iterator[_Process]:
    process = _Process(tmp_path, nats_config.url, drain_timeout_s=1.0)
    yield process
    process.stop()


async def test_a_worker_from_its_first_heartbeat_to_its_last(
    worker: _Process, nats_config: NatsConfig
) -> None:
    async with _scheduler(nats_config) as scheduler:
        await eventually(lambda: bool(scheduler.statuses), 60.0, "the first heartbeat")
        assert scheduler.worker.num_free_blocks == _NUM_BLOCKS
        await _serves(scheduler)
        await _cancel_frees_the_pool(scheduler)
        await _drains(scheduler, worker)


async def _serves(scheduler: _Scheduler) -> None:
    names = [f"r{i}" for i in range(8)]
    await asyncio.gather(*(scheduler.dispatch(name, 40) for name in names))
    await eventually(lambda: all(scheduler.end(name) for name in names))
    for name in names:
        done = Done(epoch=1, finish_reason=FinishReason.LENGTH, num_tokens=40)
        assert scheduler.end(name) == done
        assert len(scheduler.tokens(name)) == 40
        usage = scheduler.frames[name][-2]
        assert isinstance(usage, Usage)
        assert (usage.prompt_tokens, usage.completion_tokens) == (3, 40)
    records: list[RequestRecord] = []

    async def all_recorded() -> bool:
        records.extend(await scheduler.records())
        depth = await scheduler.bus.jobs.depth(_LINE)
        return len(records) == 8 and depth.num_leased == depth.num_queued == 0

    await eventually(all_recorded, what="a record each, and an empty queue")
    assert {record.completion_tokens for record in records} == {40}
    assert all(record.ttft_ms > 0 for record in records)
    # A late reader has it all again.
    before = scheduler.tokens("r0")
    scheduler.frames.clear()
    reply = await scheduler.command(Replay(request_id="r0", from_index=0, reply="gw"))
    assert reply.ok
    await eventually(lambda: scheduler.end("r0") is not None)
    assert scheduler.tokens("r0") == before


async def _cancel_frees_the_pool(scheduler: _Scheduler) -> None:
    await scheduler.dispatch("long", 900)
    await eventually(lambda: len(scheduler.tokens("long")) > 20)
    await scheduler.bus.control.cancel(Cancel(request_id="long"))
    await eventually(lambda: scheduler.end("long") is not None)
    terminal = scheduler.end("long")
    assert isinstance(terminal, Cancelled)
    assert terminal.num_tokens == len(scheduler.tokens("long")) < 900
    cancelled_ns = scheduler.worker.sent_ns
    await eventually(
        lambda: (
            scheduler.worker.sent_ns > cancelled_ns
            and scheduler.worker.num_free_blocks == _NUM_BLOCKS
            and scheduler.worker.num_running == 0
        ),
        what="the pool at its baseline",
    )
    (record,) = await scheduler.records()
    assert (record.status, record.completion_tokens) == (Status.CANCELLED, terminal.num_tokens)


async def _drains(scheduler: _Scheduler, worker: _Process) -> None:
    await scheduler.dispatch("rest", 900)
    await eventually(lambda: len(scheduler.tokens("rest")) > 5)
    engine = worker.engine()
    worker.popen.send_signal(signal.SIGTERM)
    code = await asyncio.to_thread(worker.popen.wait, 10.0)
    assert code == 0, worker.log.read_text()
    assert scheduler.worker.retired
    assert not engine.is_running()
    if scheduler.end("rest") is None:
        (leased,) = await scheduler.bus.jobs.pull(_LINE, 1, 2.0)
        assert leased.job.request_id == "rest"
        assert leased.num_deliveries == 2


async def test_kill_9_leaves_no_engine_behind(worker: _Process, nats_config: NatsConfig) -> None:
    async with _scheduler(nats_config) as scheduler:
        await eventually(lambda: bool(scheduler.statuses), 60.0, "the first heartbeat")
        await scheduler.dispatch("r", 900)
        await eventually(lambda: len(scheduler.tokens("r")) > 5)
        engine = worker.engine()
        os.kill(worker.popen.pid, signal.SIGKILL)
        worker.popen.wait()
        await eventually(lambda: not engine.is_running(), 5.0, "the engine's end")


async def test_a_dead_engine_is_replaced_under_its_streams(
    worker: _Process, nats_config: NatsConfig
) -> None:
    """Twice; then its checkpoint is gone, no other can start, and the worker ends with an error."""
    formed = {
        "grammar": Grammar(kind=GrammarKind.REGEX, text="([a-z]{3} )+"),
        "frequency_penalty": 1.0,
        "bad_words": ("e",),
    }
    plain, by_form = [f"s{i}" for i in range(16)], [f"f{i}" for i in range(4)]
    names = [*plain, *by_form]
    async with _scheduler(nats_config) as scheduler:
        await eventually(lambda: bool(scheduler.statuses), 60.0, "the first heartbeat")
        await scheduler.dispatch("plain", 200)
        await scheduler.dispatch("formed", 200, **formed)
        await eventually(lambda: all(map(scheduler.end, ("plain", "formed"))), 20.0)
        await asyncio.gather(*(scheduler.dispatch(name, 200) for name in plain))
        await asyncio.gather(*(scheduler.dispatch(name, 200, **formed) for name in by_form))
        worker_id = scheduler.worker.worker_id
        for least in (5, 50):
            await eventually(lambda n=least: all(len(scheduler.tokens(s)) > n for s in names))
            engine = worker.engine()
            engine.kill()
            await eventually(lambda old=engine.pid: worker.engine_pid() not in (None, old), 30.0)
        await eventually(lambda: all(scheduler.end(name) for name in names), 30.0)
        for name in names:
            end = scheduler.end(name)
            assert end == Done(epoch=1, finish_reason=FinishReason.LENGTH, num_tokens=200)
            undisturbed = "plain" if name in plain else "formed"
            assert scheduler.tokens(name) == scheduler.tokens(undisturbed)
            deltas = [frame for frame in scheduler.frames[name] if isinstance(frame, Delta)]
            starts = [0, *accumulate(len(delta.token_ids) for delta in deltas)]
            assert [delta.index for delta in deltas] == starts[:-1]
        records: list[RequestRecord] = []

        async def all_recorded() -> bool:
            records.extend(await scheduler.records())
            return len(records) == 22

        await eventually(all_recorded, what="a record each")
        assert {record.worker_id for record in records} == {worker_id}
        worker.checkpoint.rename(worker.checkpoint.with_name("gone"))
        worker.engine().kill()
        assert await asyncio.to_thread(worker.popen.wait, 40.0) == 1
        assert "config.json" in worker.log.read_text().splitlines()[-1]
        await eventually(lambda: scheduler.worker.retired)


def test_a_bad_configuration_is_told_in_a_sentence(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("worker: {nmae: w1}")
    ended = subprocess.run(
        [sys.executable, "-m", "workers", "--config", str(config)],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith("workers: ")
    assert "nmae" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
