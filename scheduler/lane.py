"""One model's jobs between the queue and the workers."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine
from typing import Any

from scheduler import placement
from scheduler.entry import Entry, State
from scheduler.parts import Parts
from scheduler.sender import Result, Sender, Sent
from scheduler.throughput import Throughput, eta_s
from scheduler.verdicts import Verdict, failed, refused
from schemas.control import Cancel
from schemas.errors import BusUnavailableError, ContextLengthError, MillraceError
from schemas.frames import Queued

logger = logging.getLogger(__name__)


class Lane:
    """Jobs that wait for room, oldest first, and what becomes of those that were sent.

    It owns the entries of its model from the moment they are ready. ``wake`` is set whenever
    something changed that may let the pull go on.
    """

    def __init__(self, parts: Parts, model: str) -> None:
        self.model = model
        self.wake = asyncio.Event()
        self.throughput = Throughput()
        self.num_preparing = 0
        self._parts = parts
        self._sender = Sender(parts)
        self._waiting: deque[Entry] = deque()
        self._stopped = False

    @property
    def num_waiting(self) -> int:
        return sum(entry.state is State.WAITING for entry in self._waiting)

    @property
    def num_wanted(self) -> int:
        """How many jobs there is room for now beyond those that are here already."""
        if self._stopped or self.num_waiting or not self._parts.bus.connected:
            return 0
        return max(0, self._parts.fleet.room(self.model) - self.num_preparing)

    def stop(self) -> None:
        """Send nothing any more."""
        self._stopped = True

    # --- in and out ---

    def enqueue(self, entry: Entry) -> None:
        """A prepared job is ready; one that ran before goes first."""
        entry.state = State.WAITING
        if entry.ran_before:
            self._waiting.appendleft(entry)
        else:
            self._waiting.append(entry)
        self.pump()

    def pump(self) -> None:
        """Send what has room, in order."""
        parts = self._parts
        while self._waiting and parts.bus.connected and not self._stopped:
            entry = self._waiting[0]
            if entry.state is not State.WAITING:
                self._waiting.popleft()
                continue
            worker = placement.choose(parts.fleet.of_model(self.model), entry.need)
            if worker is None:
                if not self._end_if_too_long(entry):
                    break
                continue
            self._waiting.popleft()
            entry.state = State.DISPATCHING
            entry.worker_id = worker.worker_id
            parts.fleet.reserve(worker.worker_id, entry.request_id, entry.need)
            parts.tasks.spawn(self._dispatch(entry), f"dispatch {entry.request_id}")
        self._tell_queued()
        self.wake.set()

    def _end_if_too_long(self, entry: Entry) -> bool:
        longest = placement.longest_tokens(self._parts.fleet.of_model(self.model))
        if longest is None or entry.need.total_tokens <= longest:
            return False
        job = entry.job
        max_tokens = job.sampling.max_tokens if job.pooling is None else None
        error = ContextLengthError(len(job.prompt_token_ids or ()), max_tokens, longest)
        self.end(entry, refused(error))
        return True

    def end(self, entry: Entry, verdict: Verdict, *, bury: bool = False) -> None:
        """Answer a job without a worker; it is nobody's but the queue's until that is done."""
        self._parts.table.drop(entry)
        self._parts.tasks.spawn(self._end(entry, verdict, bury=bury), f"end {entry.request_id}")

    async def _end(self, entry: Entry, verdict: Verdict, *, bury: bool) -> None:
        endings = self._parts.endings
        try:
            await (endings.give_up(entry, verdict) if bury else endings.end(entry, verdict))
        except BusUnavailableError as error:
            logger.warning(
                "a job will be answered when it is delivered again",
                extra={"request_id": entry.request_id, "reason": error.message},
            )

    def ended(self, entry: Entry) -> None:
        """The worker is done with it: it leaves for good."""
        self._parts.fleet.release(entry.worker_id, entry.request_id)
        self._parts.table.drop(entry)

    def answered(self, entry: Entry) -> None:
        """An earlier run ended it, though the queue does not know yet: do not run it again."""
        self.ended(entry)
        self._parts.tasks.spawn(self._ack(entry), f"ack {entry.request_id}")

    def overtaken(self, entry: Entry) -> None:
        """Somebody runs it at a higher epoch and holds the lease."""
        logger.info("another scheduler has the job", extra={"request_id": entry.request_id})
        self.ended(entry)

    # --- sending ---

    async def _dispatch(self, entry: Entry) -> None:
        await self._follow_up(entry, self._sender.send(entry, entry.worker_id))

    async def continue_where_it_runs(self, entry: Entry, worker_id: str) -> None:
        """The queue delivered a job again that a live worker has: it goes on under the new lease,
        and if the worker does not have it after all, it is sent as any other."""
        fleet = self._parts.fleet
        entry.state = State.DISPATCHING
        entry.worker_id = worker_id
        worker = fleet.get(worker_id)
        if worker is not None and entry.request_id not in worker.runs:
            fleet.reserve(worker_id, entry.request_id, entry.need)
        await self._follow_up(entry, self._sender.continue_at(entry, worker_id))

    async def _follow_up(self, entry: Entry, sending: Coroutine[Any, Any, Sent]) -> None:
        try:
            sent = await sending
        except BusUnavailableError:
            self._take_back(entry)
            return
        except Exception as error:
            # A bug here ends one job: it may not keep a worker's room and a lease for ever.
            logger.exception(
                "a job could not be dispatched", extra={"request_id": entry.request_id}
            )
            message = f"The job could not be dispatched: {type(error).__name__}."
            verdict = failed(MillraceError.code, message, retryable=False)
            sent = Sent(Result.ENDS, verdict)
        self._follow(entry, sent)

    def _follow(self, entry: Entry, sent: Sent) -> None:
        fleet, worker_id = self._parts.fleet, entry.worker_id
        if entry.state is State.ENDED:
            fleet.release(worker_id, entry.request_id)
            self.pump()
            return
        match sent.result:
            case Result.ACCEPTED:
                self._accepted(entry)
            case Result.REFUSED:
                self._take_back(entry)
                fleet.refuse(worker_id)
            case Result.LOST:
                self.lost(entry)
                fleet.refuse(worker_id)
            case Result.ANSWERED:
                self.answered(entry)
            case Result.OVERTAKEN:
                self.overtaken(entry)
            case Result.ENDS:
                assert sent.verdict is not None
                fleet.release(worker_id, entry.request_id)
                self.end(entry, sent.verdict)
        self.pump()

    def _accepted(self, entry: Entry) -> None:
        parts = self._parts
        if parts.fleet.get(entry.worker_id) is None:
            self.lost(entry)
            return
        parts.fleet.confirm(entry.worker_id, entry.request_id)
        entry.state = State.RUNNING
        reason = parts.cancels.reason(entry.request_id, parts.clock.monotonic())
        if reason is not None:
            # The worker may have heard the cancel before the dispatch.
            cancel = Cancel(request_id=entry.request_id, reason=reason)
            parts.tasks.spawn(parts.bus.control.cancel(cancel), f"cancel {entry.request_id}")

    def _take_back(self, entry: Entry) -> None:
        """Nothing ran there; it waits for room again, before the others."""
        self._parts.fleet.release(entry.worker_id, entry.request_id)
        entry.worker_id = ""
        if entry.state is not State.ENDED:
            entry.state = State.WAITING
            self._waiting.appendleft(entry)

    def lost(self, entry: Entry) -> None:
        """The worker that has it, or may have it, is gone: run it again elsewhere."""
        self._parts.fleet.release(entry.worker_id, entry.request_id)
        entry.worker_id = ""
        entry.ran_before = True
        entry.num_failures += 1
        entry.extended_s = float("-inf")
        if entry.num_failures >= self._parts.config.max_attempts:
            message = f"The request was given to {entry.num_failures} workers and none answered it."
            self.end(entry, failed("too_many_attempts", message, retryable=True), bury=True)
            return
        verdict = self._parts.unwanted(entry)
        if verdict is not None:
            self.end(entry, verdict)
            return
        self._take_back(entry)

    async def _ack(self, entry: Entry) -> None:
        try:
            await self._parts.bus.jobs.ack(entry.lease)
        except BusUnavailableError:
            logger.warning(
                "an answered job will be delivered again", extra={"request_id": entry.request_id}
            )

    # --- those who wait ---

    def end_unwanted(self) -> None:
        """End what was cancelled or came too late while it waited."""
        for entry in list(self._waiting):
            verdict = self._parts.unwanted(entry) if entry.state is State.WAITING else None
            if verdict is not None:
                self.end(entry, verdict)
        self.pump()

    def _tell_queued(self) -> None:
        per_s = self.throughput.per_s(self._parts.clock.monotonic())
        waiting = (entry for entry in self._waiting if entry.state is State.WAITING)
        for position, entry in enumerate(waiting):
            if entry.told_queued or not entry.job.reply:
                continue
            entry.told_queued = True
            frame = Queued(position=position, eta_s=eta_s(position + 1, per_s))
            self._parts.tasks.spawn(self._tell(entry, frame), f"queued {entry.request_id}")

    async def _tell(self, entry: Entry, frame: Queued) -> None:
        job = entry.job
        await self._parts.bus.frames.publish(
            job.reply,
            [(job.request_id, frame)],
            batch=job.batch_frames,
            as_json=job.frames_as_json,
        )
