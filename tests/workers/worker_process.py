"""Processes of ``python -m millrace.workers`` with a tiny checkpoint, and a scheduler by hand."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import yaml

from millrace.bus import nats
from millrace.bus.api import Bus
from millrace.bus.codec import RECORD
from millrace.bus.job_queue import TenantQueue
from millrace.bus.nats.permissions import Part
from millrace.schemas.config import NatsConfig, RedisConfig
from millrace.schemas.control import Dispatch, Ended, WorkerCommand, WorkerReply, WorkerStatus
from millrace.schemas.frames import TERMINAL_FRAMES, Delta, Frame
from millrace.schemas.jobs import Job, Tier
from millrace.schemas.records import RequestRecord
from millrace.schemas.sampling import SamplingParams
from tests.support.engine.checkpoints_made import write_checkpoint
from tests.support.servers import free_port

ROOT = Path(__file__).resolve().parents[2]
NUM_BLOCKS = 64
LINE = TenantQueue("tiny", Tier.FREE, "local")


class WorkerProcess:
    """Process of a worker, and its log; without ``redis`` no Redis listens at its address."""

    def __init__(
        self, folder: Path, nats_url: str, redis: RedisConfig | None = None, **worker: object
    ) -> None:
        self.checkpoint = write_checkpoint(folder / "tiny", max_position_embeddings=4096)
        settings = {
            "nats": {"url": nats_url},
            "redis": {"url": redis.url if redis else f"redis://127.0.0.1:{free_port()}/0"},
            "worker": {
                "name": "w1",
                "model": str(self.checkpoint),
                "engine": {"num_blocks": NUM_BLOCKS, "num_threads": 1, "device": "cpu"},
                **worker,
            },
        }
        config = folder / "config.yaml"
        config.write_text(yaml.safe_dump(settings))
        self.log = folder / "worker.log"
        with self.log.open("wb") as log:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "millrace.workers", "--config", str(config)],
                stdout=log,
                stderr=log,
                cwd=ROOT,
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


class HandScheduler:
    """Stand-in for scheduler and gateway: it dispatches by hand and collects the frames."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.statuses: list[WorkerStatus] = []
        self.frames: dict[str, list[Frame]] = {}
        self.ended: list[Ended] = []

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

    async def publish(self, request_id: str, max_tokens: int, **sampling: Any) -> None:
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

    async def dispatch(self, request_id: str, max_tokens: int, **sampling: Any) -> None:
        await self.publish(request_id, max_tokens, **sampling)
        (leased,) = await self.bus.jobs.pull(LINE, 1, 5.0)
        reply = await self.command(Dispatch(job=leased.job, epoch=1, lease=leased.lease))
        assert reply.ok, reply

    async def records(self) -> list[RequestRecord]:
        pulled = await self.bus.outbox.pull(1000, 1.0)
        await self.bus.outbox.ack(pulled)
        items = [RECORD.decode(message.payload) for message in pulled]
        return [item for item in items if isinstance(item, RequestRecord)]


@asynccontextmanager
async def hand_scheduler(config: NatsConfig) -> AsyncIterator[HandScheduler]:
    bus = await nats.connect(config, "test", part=Part.SCHEDULER)
    scheduler = HandScheduler(bus)
    await bus.frames.subscribe("gw", scheduler.on_frame)
    await bus.workers.watch(scheduler.statuses.append)
    await bus.control.subscribe_ended(scheduler.ended.append)
    try:
        yield scheduler
    finally:
        await bus.close()
