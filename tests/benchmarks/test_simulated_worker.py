"""Simulated worker: it answers as a fleet does, at its pace, without computing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from benchmarks.support.simulated_worker import MODEL, WORKER_ID, SimulatedWorker
from millrace.bus.memory import MemoryBroker, MemoryBus
from millrace.schemas.control import Cancel, Replay
from millrace.schemas.frames import Cancelled, Delta, Done, Frame, Started, Usage
from millrace.schemas.jobs import Job
from millrace.schemas.sampling import SamplingParams
from tests.support.waiting import eventually

REPLY = "reader"


class Running:
    """Running worker, and the frames of each request."""

    def __init__(self) -> None:
        broker = MemoryBroker()
        self.bus = MemoryBus(broker)
        self.worker = SimulatedWorker(MemoryBus(broker), tokens_per_s=50.0)
        self.frames: dict[str, list[Frame]] = {}

    def on_frame(self, request_id: str, frame: Frame) -> None:
        self.frames.setdefault(request_id, []).append(frame)

    async def publish(self, request_id: str, max_tokens: int) -> None:
        await self.bus.jobs.publish(
            Job(
                request_id=request_id,
                model=MODEL,
                prompt_token_ids=(1, 2, 3),
                sampling=SamplingParams(max_tokens=max_tokens),
                reply=REPLY,
            )
        )


@asynccontextmanager
async def running() -> AsyncIterator[Running]:
    made = Running()
    ready = asyncio.Event()
    await made.bus.frames.subscribe(REPLY, made.on_frame)
    working = asyncio.create_task(made.worker.run(ready.set))
    await ready.wait()
    try:
        yield made
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


async def test_a_job_gets_all_its_tokens_and_one_end() -> None:
    begun_ns = time.perf_counter_ns()
    async with running() as made:
        await made.publish("a", 4)
        await eventually(lambda: len(made.frames.get("a", ())) == 7)
    started, *deltas, usage, done = made.frames["a"]
    assert started == Started(worker_id=WORKER_ID, num_prompt_tokens=3)
    assert [d.index for d in deltas if isinstance(d, Delta)] == [0, 1, 2, 3]
    sent_ns = [int(d.text) for d in deltas if isinstance(d, Delta)]
    assert begun_ns < sent_ns[0]
    assert sent_ns == sorted(sent_ns)
    assert usage == Usage(prompt_tokens=3, completion_tokens=4)
    assert isinstance(done, Done)
    assert done.num_tokens == 4


async def test_a_cancel_ends_a_job() -> None:
    async with running() as made:
        await made.publish("a", 1_000)
        await eventually(lambda: len(made.frames.get("a", ())) > 3)
        await made.bus.control.cancel(Cancel(request_id="a"))
        await eventually(lambda: isinstance(made.frames["a"][-1], Cancelled))
        num_frames = len(made.frames["a"])
        await made.publish("b", 3)
        await eventually(lambda: isinstance(made.frames.get("b", [None])[-1], Done))
        assert len(made.frames["a"]) == num_frames


async def test_missed_tokens_are_sent_again() -> None:
    async with running() as made:
        await made.publish("a", 1_000)
        await eventually(lambda: len(made.frames.get("a", ())) > 4)
        again: list[Frame] = []
        await made.bus.frames.subscribe("other", lambda _id, frame: again.append(frame))
        asked = Replay(request_id="a", from_index=1, reply="other")
        answer = await made.bus.control.command(WORKER_ID, asked, 1.0)
        assert answer is not None
        assert answer.ok
        await eventually(lambda: len(again) >= 2)
        unknown = Replay(request_id="unknown", from_index=0, reply="other")
        answer = await made.bus.control.command(WORKER_ID, unknown, 1.0)
        assert answer is not None
        assert answer.reason == "unknown_request"
    assert [frame.index for frame in again if isinstance(frame, Delta)][:2] == [1, 2]
