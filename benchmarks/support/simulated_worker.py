"""Simulated workers for measurements of a gateway.

``LockstepWorker`` gives one token to each of a fixed set of streams in each step. A
``SimulatedWorker`` is a whole fleet: it takes the jobs of a model from the queue and answers each
at a steady pace, until its ``max_tokens`` or a cancel. The text of each token is the time at which
it was sent, so that a reader can compute its latency.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Event

import uvloop

from benchmarks.support.processes import SPAWN, spawned
from millrace.bus import nats
from millrace.bus.api import Bus
from millrace.bus.nats import NatsBus
from millrace.bus.nats.permissions import Part
from millrace.schemas.config import NatsConfig
from millrace.schemas.control import Cancel, Replay, WorkerCommand, WorkerReply, WorkerStatus
from millrace.schemas.frames import Cancelled, Delta, Done, FinishReason, Frame, Started, Usage
from millrace.schemas.jobs import Job
from tests.support.model_queue import ModelQueue

MODEL = "demo"
WORKER_ID = "simulated-1"
_TEXT = " token"
_STEP_S = 0.01
_PULL_JOBS = 512
_PULL_S = 0.5
_HEARTBEAT_S = 0.5
_TAKE_TIMEOUT_S = 30.0
_START_TIMEOUT_S = 30.0


def stamp() -> str:
    """Return the text of a token sent now: a space and 19 digits of nanoseconds.

    The clock is common to all processes of a machine.
    """
    return f" {time.perf_counter_ns():019d}"


class LockstepWorker:
    """Worker that sends one token to each of many streams in each step, as one envelope."""

    def __init__(self, bus: Bus, reply: str, request_ids: list[str]) -> None:
        self._bus = bus
        self._reply = reply
        self._request_ids = request_ids
        self._index = 0

    async def start(self) -> None:
        await self._send_all(Started(worker_id=WORKER_ID, num_prompt_tokens=1))

    async def steps(self, num_steps: int, pace_steps_per_s: float | None) -> None:
        """Run steps at a steady pace, or as fast as the server accepts them."""
        start_s = time.perf_counter()
        for step in range(num_steps):
            await self._send_all(Delta(index=self._index, token_ids=(7,), text=_TEXT))
            self._index += 1
            if pace_steps_per_s is None:
                await asyncio.sleep(0)
            else:
                late_s = time.perf_counter() - start_s - (step + 1) / pace_steps_per_s
                await asyncio.sleep(max(0.0, -late_s))

    async def end(self) -> None:
        total = self._index
        await self._send_all(Usage(prompt_tokens=1, completion_tokens=total))
        await self._send_all(Done(finish_reason=FinishReason.LENGTH, num_tokens=total))

    async def _send_all(self, frame: Frame) -> None:
        await self._bus.frames.publish(
            self._reply, [(request_id, frame) for request_id in self._request_ids], batch=True
        )


async def take_jobs(bus: NatsBus, num_jobs: int) -> list[Job]:
    """Take ``num_jobs`` jobs off the queue. Raises TimeoutError if they do not come."""
    jobs: list[Job] = []
    queue = ModelQueue(bus, MODEL)
    async with asyncio.timeout(_TAKE_TIMEOUT_S):
        while len(jobs) < num_jobs:
            for leased in await queue.pull(num_jobs - len(jobs), 1.0):
                jobs.append(leased.job)
                await bus.jobs.ack(leased.lease)
    await queue.close()
    return jobs


class _Sequence:
    __slots__ = ("index", "job", "slot", "total")

    def __init__(self, job: Job, slot: int) -> None:
        self.job = job
        self.slot = slot
        self.index = 0
        self.total = job.sampling.max_tokens or 1


class SimulatedWorker:
    """Worker that answers jobs until it is cancelled.

    The first token is sent when a job arrives, the others at ``tokens_per_s``. All tokens due in a
    step of 10 ms go in one envelope to each gateway.
    """

    def __init__(self, bus: Bus, tokens_per_s: float) -> None:
        self._bus = bus
        self._queue = ModelQueue(bus, MODEL)
        self._sequences: dict[str, _Sequence] = {}
        num_slots = max(1, round(1 / (tokens_per_s * _STEP_S)))
        # Streams that get a token in the same step; each slot has its turn once per token time.
        self._slots: list[dict[str, _Sequence]] = [{} for _ in range(num_slots)]

    async def run(self, on_ready: Callable[[], object]) -> None:
        """Take jobs; ``on_ready`` is called once the worker is ready."""
        subscriptions = [
            await self._bus.control.subscribe_cancels(self._on_cancel),
            await self._bus.control.serve_commands(WORKER_ID, self._on_command),
        ]
        await self._heartbeat()
        on_ready()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._take_forever())
                tasks.create_task(self._step_forever())
                tasks.create_task(self._beat_forever())
        finally:
            for subscription in (*subscriptions, self._queue):
                await subscription.close()

    async def adopt(self, jobs: list[Job]) -> None:
        """Answer jobs that are in no queue."""
        out: dict[str, list[tuple[str, Frame]]] = {}
        for job in jobs:
            out.setdefault(job.reply, []).extend(self._begin(job))
        await self._send(out)

    async def _take_forever(self) -> None:
        while True:
            leased = await self._queue.pull(_PULL_JOBS, _PULL_S)
            await self.adopt([one.job for one in leased])
            for one in leased:
                await self._bus.jobs.ack(one.lease)

    def _begin(self, job: Job) -> list[tuple[str, Frame]]:
        slot = min(range(len(self._slots)), key=lambda place: len(self._slots[place]))
        sequence = _Sequence(job, slot)
        self._sequences[job.request_id] = self._slots[slot][job.request_id] = sequence
        num_prompt_tokens = len(job.prompt_token_ids or ())
        started = Started(worker_id=WORKER_ID, num_prompt_tokens=num_prompt_tokens)
        return [(job.request_id, started), *self._next(sequence, stamp())]

    def _next(self, sequence: _Sequence, text: str) -> list[tuple[str, Frame]]:
        """Return the frames of one more token."""
        request_id, index = sequence.job.request_id, sequence.index
        sequence.index += 1
        frames: list[tuple[str, Frame]] = [
            (request_id, Delta(index=index, token_ids=(7,), text=text))
        ]
        if sequence.index == sequence.total:
            self._forget(sequence)
            usage = Usage(
                prompt_tokens=sequence.job.num_paid_prompt_tokens,
                completion_tokens=sequence.total,
            )
            done = Done(finish_reason=FinishReason.LENGTH, num_tokens=sequence.total)
            frames += [(request_id, usage), (request_id, done)]
        return frames

    def _forget(self, sequence: _Sequence) -> None:
        self._sequences.pop(sequence.job.request_id, None)
        self._slots[sequence.slot].pop(sequence.job.request_id, None)

    async def _step_forever(self) -> None:
        start_s, step = time.perf_counter(), 0
        while True:
            text = stamp()
            out: dict[str, list[tuple[str, Frame]]] = {}
            for sequence in list(self._slots[step % len(self._slots)].values()):
                out.setdefault(sequence.job.reply, []).extend(self._next(sequence, text))
            await self._send(out)
            step += 1
            late_s = time.perf_counter() - start_s - step * _STEP_S
            await asyncio.sleep(max(0.0, -late_s))

    async def _send(self, out: dict[str, list[tuple[str, Frame]]]) -> None:
        for reply, frames in out.items():
            await self._bus.frames.publish(reply, frames, batch=True)

    def _on_cancel(self, cancel: Cancel) -> None:
        sequence = self._sequences.get(cancel.request_id)
        if sequence is not None:
            asyncio.get_running_loop().create_task(self._cancelled(sequence))

    async def _cancelled(self, sequence: _Sequence) -> None:
        self._forget(sequence)
        frame = Cancelled(num_tokens=sequence.index)
        await self._send({sequence.job.reply: [(sequence.job.request_id, frame)]})

    async def _on_command(self, command: WorkerCommand) -> WorkerReply:
        """Send frames again that a gateway missed, with the time of the second sending."""
        if not isinstance(command, Replay):
            return WorkerReply(ok=False, reason="bad_request", message="replays alone are known")
        sequence = self._sequences.get(command.request_id)
        if sequence is None:
            return WorkerReply(ok=False, reason="unknown_request")
        missing = range(command.from_index, sequence.index)
        text = stamp()
        frames: list[tuple[str, Frame]] = [
            (command.request_id, Delta(index=index, token_ids=(7,), text=text)) for index in missing
        ]
        await self._send({command.reply: frames})
        return WorkerReply(ok=True)

    async def _beat_forever(self) -> None:
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            await self._heartbeat()

    async def _heartbeat(self) -> None:
        await self._bus.workers.announce(
            WorkerStatus(
                worker_id=WORKER_ID,
                name="simulated",
                model=MODEL,
                max_num_sequences=1_000_000,
                num_running=len(self._sequences),
                max_tokens_per_request=1_000_000,
                sent_ns=time.time_ns(),
            )
        )


@contextlib.contextmanager
def simulated_worker(nats_url: str, tokens_per_s: float) -> Iterator[None]:
    """Run a simulated worker in a separate process during the block."""
    ready = SPAWN.Event()
    with spawned(_run_worker, nats_url, tokens_per_s, ready):
        if not ready.wait(_START_TIMEOUT_S):
            raise RuntimeError("the simulated worker did not start")
        yield


def _run_worker(nats_url: str, tokens_per_s: float, ready: Event) -> None:
    async def run() -> None:
        bus = await nats.connect(NatsConfig(url=nats_url), "simulated worker", part=Part.SCHEDULER)
        await SimulatedWorker(bus, tokens_per_s).run(ready.set)

    uvloop.run(run())
