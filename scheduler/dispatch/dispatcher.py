"""One model's jobs between the queue and the workers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from scheduler.dispatch.context import Parts
from scheduler.dispatch.counts import LaneCounts, Rerun
from scheduler.dispatch.migration import Moves
from scheduler.dispatch.places import Places
from scheduler.dispatch.preemption import Overtaking
from scheduler.dispatch.sender import Result, Sender, Sent
from scheduler.fleet.worker_view import WorkerView
from scheduler.jobs.entry import Entry, State
from scheduler.jobs.poison_pills import PoisonPillDetector
from scheduler.jobs.prompt_keys import PromptKeys
from scheduler.jobs.terminal_status import Verdict, failed, poisonous
from scheduler.queues.arrivals import Arrivals
from scheduler.queues.fair_queue import FairQueue, Tenant, tenant_of
from scheduler.queues.output_lengths import Estimates
from scheduler.queues.throughput import Throughput
from schemas.control import Cancel, Served
from schemas.errors import BusUnavailableError, MillraceError
from schemas.jobs import Tier

logger = logging.getLogger(__name__)


class Lane:
    """Jobs that wait for room, and what becomes of those that were sent.

    It owns the entries of its model from the moment they were pulled. All of ``wakes`` are set
    whenever something changed that may let a pull go on, ``has_waiting`` when a job has to wait.
    """

    def __init__(self, parts: Parts, model: str) -> None:
        self.model = model
        self.wakes: list[asyncio.Event] = []
        self.has_waiting = asyncio.Event()
        self.throughput = Throughput()
        self.queue = FairQueue(parts.config)
        self.estimates = Estimates()
        self.arrivals = Arrivals(parts.clock.monotonic())
        self.counts = LaneCounts()
        self._parts = parts
        self._sender = Sender(parts)
        self._moves = Moves(parts, model, self._move)
        self._overtaking = Overtaking(parts, model, self.queue, self.pump)
        self._num_preparing = dict.fromkeys(Tier, 0)
        self._stopped = False

    # --- how much there is, and room for ---

    @property
    def is_served(self) -> bool:
        """There are workers, and jobs may be sent to them."""
        return not self._stopped and self._parts.fleet.num_taking(self.model) > 0

    def num_of(self, tier: Tier) -> int:
        """Jobs of a tier that were pulled and not sent so far."""
        return self.queue.num_of(tier) + self._num_preparing[tier]

    def num_here(self, *, is_batch: bool) -> int:
        """Jobs that were pulled and not sent so far, of batches or of the others."""
        return sum([self.num_of(tier) for tier in Tier if (tier is Tier.BATCH) is is_batch])

    def spare_room(self, tier: Tier) -> int:
        """How many jobs of a tier could be sent now beside those that are here and go first."""
        if self._stopped:
            return 0
        room = self._parts.fleet.room(self.model, tier) - self.num_here(is_batch=False)
        return room - self.num_here(is_batch=True) if tier is Tier.BATCH else room

    def stop(self) -> None:
        """Send nothing any more."""
        self._stopped = True
        self._moves.stop()

    # --- in and out ---

    def took(self, entry: Entry) -> None:
        """It was pulled and is made ready; ours to answer for."""
        self._parts.table.add(entry)
        entry.queue_counts.num_ours += 1
        entry.wait_here()
        self._num_preparing[entry.job.tier] += 1

    def enqueue(self, entry: Entry) -> None:
        """A prepared job is ready."""
        self._prepared(entry)
        entry.state = State.WAITING
        self.queue.push(entry)
        self.pump()
        if entry in self.queue:
            self.has_waiting.set()

    def _prepared(self, entry: Entry) -> None:
        """Its prompt is known."""
        self._leave_preparation(entry)
        expected = self.estimates.expected_output(entry.job.tenant, entry.need.num_new_tokens)
        entry.expected_output_tokens = expected
        entry.expected_tokens = self._service(entry.need.num_context_tokens, expected)
        entry.prefix_keys = PromptKeys.of_job(entry.job)
        self.arrivals.note(entry, self._parts.clock.monotonic())

    def _leave_preparation(self, entry: Entry) -> None:
        if entry.state is State.PREPARING:
            self._num_preparing[entry.job.tier] -= 1

    def _service(self, prompt_tokens: float, output_tokens: float) -> float:
        return prompt_tokens + self._parts.config.output_weight * output_tokens

    def _drop(self, entry: Entry, error: str = "") -> None:
        """It is over here, wherever it was."""
        if entry.is_ended:
            return
        self._leave_preparation(entry)
        self.queue.remove(entry)
        entry.wait_no_more()
        entry.queue_counts.num_ours -= 1
        self._refund(entry)
        if entry.suspicion.detector is not None:
            entry.suspicion.detector.report(entry.suspicion, progressed=True)
        self._parts.table.drop(entry, error)
        if self._parts.door is not None:
            self._parts.door.left(entry)
        self._wake()

    def pump(self) -> None:
        """Send what has room, in the order of the queue.

        One that is too large for what is free lets others go, but to other workers than the one
        that it waits for. One for whose tier there is no room lets those of higher tiers go.
        """
        overtaking = self._overtaking
        overtaking.begin_round()
        places = Places(self._parts, self.model, overtaking)
        while self._parts.bus.connected and not self._stopped:
            entry = self.queue.head(overtaking.above)
            if entry is None:
                break
            verdict = self._parts.unwanted(entry)
            if verdict is not None:
                self.end(entry, verdict)
            elif not overtaking.may_go(entry):
                break
            elif (place := places.find(entry)) is not None:
                self._send(entry, *place)
            elif (verdict := places.too_long(entry)) is not None:
                self.end(entry, verdict)
            elif places.keep_for(entry):
                self.queue.pass_over(entry)
            else:
                overtaking.hold_up(entry)
        overtaking.end_round()
        self.queue.look_again()
        self._wake()

    def _send(self, entry: Entry, worker: WorkerView, num_cached_tokens: int) -> None:
        self.queue.remove(entry)
        entry.wait_no_more()
        entry.state = State.DISPATCHING
        entry.place(worker.worker_id, num_cached_tokens)
        entry.charged_tokens = entry.expected_tokens - num_cached_tokens
        self._overtaking.has_turn(entry.job.tier)
        self.queue.charge(tenant_of(entry), entry.charged_tokens)
        self._parts.fleet.reserve(
            worker.worker_id,
            entry.request_id,
            entry.need,
            entry.expected_output_tokens,
            num_cached_tokens,
        )
        self._parts.tasks.spawn(self._dispatch(entry), f"dispatch {entry.request_id}")

    def _wake(self) -> None:
        for wake in self.wakes:
            wake.set()

    def _refund(self, entry: Entry) -> None:
        """The run that its tenant was charged for is no more; what it really took is told when it
        has ended."""
        if entry.charged_tokens:
            self.queue.charge(tenant_of(entry), -entry.charged_tokens)
            entry.charged_tokens = 0.0

    # --- ends ---

    def end(self, entry: Entry, verdict: Verdict, *, bury: bool = False) -> None:
        """Answer a job without a worker; it is nobody's but the queue's until that is done. One
        that has ended already is not ours to answer."""
        if entry.is_ended:
            return
        self._drop(entry, verdict.code)
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

    def served(self, served: Served, worker_id: str) -> None:
        """What a run really took, ours or not."""
        tokens = self._service(
            served.prompt_tokens - served.cached_tokens, served.completion_tokens
        )
        entry = self._parts.table.get(served.request_id)
        if entry is not None and entry.worker_id == worker_id:
            self._refund(entry)
        elif entry is None:
            self._overtaking.has_turn(served.tier)
        self.queue.charge(Tenant(served.tier, served.tenant), tokens)
        if served.completion_tokens:
            self.estimates.observe(served.tenant, served.completion_tokens)

    def ended(self, entry: Entry) -> None:
        """The worker is done with it: it leaves for good."""
        self._parts.fleet.release(entry.worker_id, entry.request_id)
        self._drop(entry)

    def answered(self, entry: Entry) -> None:
        """An earlier run ended it, though the queue does not know yet: do not run it again."""
        self.ended(entry)
        self._parts.tasks.spawn(self._ack(entry), f"ack {entry.request_id}")

    def overtaken(self, entry: Entry) -> None:
        """Somebody runs it at a higher epoch and holds the lease."""
        logger.info("another scheduler has the job", extra={"request_id": entry.request_id})
        self.ended(entry)

    async def _ack(self, entry: Entry) -> None:
        try:
            await self._parts.bus.jobs.ack(entry.lease)
        except BusUnavailableError:
            logger.warning(
                "an answered job will be delivered again", extra={"request_id": entry.request_id}
            )

    # --- sending ---

    async def _dispatch(self, entry: Entry) -> None:
        await self._follow_up(entry, self._sender.send(entry, entry.worker_id))

    def continue_where_it_runs(self, entry: Entry, worker_id: str) -> None:
        """The queue delivered a job again that a live worker has: it goes on under the new lease,
        and if the worker does not have it after all, it is sent as any other."""
        fleet = self._parts.fleet
        if entry.state is State.PREPARING:
            self._prepared(entry)
        entry.wait_no_more()
        entry.state = State.DISPATCHING
        entry.place(worker_id, 0)
        worker = fleet.get(worker_id)
        if worker is not None and entry.request_id not in worker.runs:
            fleet.reserve(worker_id, entry.request_id, entry.need, entry.expected_output_tokens)
        going_on = self._follow_up(entry, self._sender.continue_at(entry, worker_id))
        self._parts.tasks.spawn(going_on, f"continue {entry.request_id}")

    async def _follow_up(self, entry: Entry, sending: Coroutine[Any, Any, Sent]) -> None:
        clock, counts = self._parts.clock, self.counts
        started_s = clock.monotonic()
        try:
            sent = await sending
        except BusUnavailableError:
            counts.dispatches["unsent"] += 1
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
        counts.dispatches[sent.result.name.lower()] += 1
        counts.dispatch_s.add(clock.monotonic() - started_s)
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
                fleet.refuse(worker_id, entry.job.tier)
            case Result.LOST:
                self.lost(entry)
                fleet.refuse(worker_id)
            case Result.ANSWERED:
                self.answered(entry)
            case Result.OVERTAKEN:
                self.overtaken(entry)
            case Result.POISONOUS:
                fleet.release(worker_id, entry.request_id)
                self.end(entry, poisonous(), bury=True)
            case Result.ENDS:
                assert sent.verdict is not None
                fleet.release(worker_id, entry.request_id)
                self.end(entry, sent.verdict)
        self.pump()

    def _accepted(self, entry: Entry) -> None:
        parts = self._parts
        worker = parts.fleet.get(entry.worker_id)
        if worker is None:
            self.lost(entry)
            return
        if entry.request_id not in worker.runs:
            # It was silent for too long meanwhile, and came back without our reservations.
            worker.reserve(entry.request_id, entry.need, entry.expected_output_tokens)
        parts.fleet.confirm(entry.worker_id, entry.request_id)
        entry.state = State.RUNNING
        if not entry.ran_before and entry.job.received_ns:
            queue_s = (parts.clock.now_ns() - entry.job.received_ns) / 1e9
            self.counts.queue_s[entry.job.tier].add(max(0.0, queue_s))
        reason = parts.cancels.reason(entry.request_id, parts.clock.monotonic())
        if reason is not None:
            # The worker may have heard the cancel before the dispatch.
            cancel = Cancel(request_id=entry.request_id, reason=reason)
            parts.tasks.spawn(parts.bus.control.cancel(cancel), f"cancel {entry.request_id}")

    def _take_back(self, entry: Entry) -> None:
        """It waits for room again: nothing ran there, or it is no more."""
        self._parts.fleet.release(entry.worker_id, entry.request_id)
        self._refund(entry)
        entry.take_back("not_taken")
        if entry.state is not State.ENDED:
            entry.state = State.WAITING
            entry.wait_here()
            self.queue.push(entry)
            self.has_waiting.set()

    # --- workers that go ---

    def died(self, entries: list[Entry]) -> None:
        """The worker that had these is gone without a word: run them again elsewhere, unless one
        of them is to blame."""
        PoisonPillDetector(entry.suspicion for entry in entries)
        for entry in entries:
            self.lost(entry)

    def lost(self, entry: Entry) -> None:
        """The worker that has it, or may have it, is gone: run it again elsewhere."""
        self.counts.reruns[Rerun.LOST] += 1
        entry.count_failure()
        if entry.num_failures >= self._parts.config.max_attempts:
            self._parts.fleet.release(entry.worker_id, entry.request_id)
            message = f"The request was given to {entry.num_failures} workers and none answered it."
            self.end(entry, failed("too_many_attempts", message, retryable=True), bury=True)
            return
        self._run_again(entry)

    def given_back(self, entry: Entry) -> None:
        """The worker goes, and lets others go on with it."""
        self.counts.reruns[Rerun.RETURNED] += 1
        self._run_again(entry)

    def _run_again(self, entry: Entry) -> None:
        entry.interrupt("given_back")
        entry.extended_s = float("-inf")
        verdict = self._parts.unwanted(entry)
        if verdict is not None:
            self._parts.fleet.release(entry.worker_id, entry.request_id)
            self.end(entry, verdict)
            return
        self._take_back(entry)

    def move(self, worker: WorkerView) -> None:
        """Have others go on with what a worker runs that drains, or whose engine is down."""
        if not self._stopped and self._parts.bus.connected:
            self._moves.begin(worker)

    def _move(self, entry: Entry, worker: WorkerView, num_cached_tokens: int) -> None:
        self._parts.fleet.release(entry.worker_id, entry.request_id)
        self._refund(entry)
        entry.interrupt("moved")
        self.counts.reruns[Rerun.MOVED] += 1
        self._send(entry, worker, num_cached_tokens)

    # --- those who wait ---

    def end_unwanted(self) -> None:
        """End what was cancelled or came too late while it waited."""
        for entry in self.queue:
            verdict = self._parts.unwanted(entry)
            if verdict is not None:
                self.end(entry, verdict)
        self.pump()
