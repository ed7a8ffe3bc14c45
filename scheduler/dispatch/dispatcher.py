"""One model's jobs between the queue and the workers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from scheduler.dispatch.context import SchedulerContext
from scheduler.dispatch.counts import DispatchCounts, Rerun
from scheduler.dispatch.migration import Migration
from scheduler.dispatch.placement_round import PlacementRound
from scheduler.dispatch.preemption import PreemptionPolicy
from scheduler.dispatch.sender import DispatchOutcome, DispatchResult, Sender
from scheduler.fleet.worker_view import WorkerView
from scheduler.jobs.poison_pills import PoisonPillDetector
from scheduler.jobs.prompt_keys import PromptKeys
from scheduler.jobs.scheduled_job import Phase, ScheduledJob, Tenant
from scheduler.jobs.terminal_status import TerminalStatus, failed, poison_pill
from scheduler.queues.arrivals import Arrivals
from scheduler.queues.fair_queue import FairQueue
from scheduler.queues.output_lengths import OutputLengths
from scheduler.queues.throughput import Throughput
from schemas.control import Cancel, Served
from schemas.errors import BusUnavailableError, MillraceError
from schemas.jobs import Tier

logger = logging.getLogger(__name__)


class Dispatcher:
    """Jobs that wait for room, and what becomes of those that were sent.

    It owns the entries of its model from the moment they were pulled. All of ``wakes`` are set
    whenever something changed that may let a pull go on, ``has_waiting`` when a job has to wait.
    """

    def __init__(self, context: SchedulerContext, model: str) -> None:
        self.model = model
        self.wakes: list[asyncio.Event] = []
        self.has_waiting = asyncio.Event()
        self.throughput = Throughput()
        self.queue = FairQueue(context.config)
        self.output_lengths = OutputLengths()
        self.arrivals = Arrivals(context.clock.monotonic())
        self.counts = DispatchCounts()
        self._context = context
        self._sender = Sender(context)
        self._migration = Migration(context, model, self._migrate)
        self._preemption = PreemptionPolicy(context, model, self.queue, self.dispatch_ready)
        self._num_preparing = dict.fromkeys(Tier, 0)
        self._stopped = False

    # --- how much there is, and room for ---

    @property
    def is_served(self) -> bool:
        """There are workers, and jobs may be sent to them."""
        return not self._stopped and self._context.fleet.num_accepting(self.model) > 0

    def num_of(self, tier: Tier) -> int:
        """Jobs of a tier that were pulled and not sent so far."""
        return self.queue.num_of(tier) + self._num_preparing[tier]

    def num_here(self, *, is_batch: bool) -> int:
        """Jobs that were pulled and not sent so far, of batches or of the others."""
        return sum([self.num_of(tier) for tier in Tier if (tier is Tier.BATCH) is is_batch])

    def spare_capacity(self, tier: Tier) -> int:
        """How many jobs of a tier could be sent now beside those that are here and go first."""
        if self._stopped:
            return 0
        capacity = self._context.fleet.capacity(self.model, tier) - self.num_here(is_batch=False)
        return capacity - self.num_here(is_batch=True) if tier is Tier.BATCH else capacity

    def stop(self) -> None:
        """Send nothing any more."""
        self._stopped = True
        self._migration.stop()

    # --- in and out ---

    def add_preparing(self, scheduled: ScheduledJob) -> None:
        """It was pulled and is made ready; ours to answer for."""
        self._context.job_table.add(scheduled)
        scheduled.queue_counts.num_ours += 1
        scheduled.start_waiting_here()
        self._num_preparing[scheduled.job.tier] += 1

    def enqueue(self, scheduled: ScheduledJob) -> None:
        """A prepared job is ready."""
        self._prepared(scheduled)
        scheduled.enter(Phase.WAITING)
        self.queue.push(scheduled)
        self.dispatch_ready()
        if scheduled in self.queue:
            self.has_waiting.set()

    def _prepared(self, scheduled: ScheduledJob) -> None:
        """Its prompt is known."""
        self._leave_preparation(scheduled)
        expected = self.output_lengths.expected_output(
            scheduled.job.tenant, scheduled.resources.num_new_tokens
        )
        scheduled.service.output_tokens = expected
        scheduled.service.tokens = self._service(scheduled.resources.num_context_tokens, expected)
        scheduled.prefix_keys = PromptKeys.of_job(scheduled.job)
        self.arrivals.note(scheduled, self._context.clock.monotonic())

    def _leave_preparation(self, scheduled: ScheduledJob) -> None:
        if scheduled.phase is Phase.PREPARING:
            self._num_preparing[scheduled.job.tier] -= 1

    def _service(self, prompt_tokens: float, output_tokens: float) -> float:
        return prompt_tokens + self._context.config.output_weight * output_tokens

    def _drop(self, scheduled: ScheduledJob, error: str = "") -> None:
        """It is over here, wherever it was."""
        if scheduled.is_ended:
            return
        self._leave_preparation(scheduled)
        self.queue.remove(scheduled)
        scheduled.stop_waiting_here()
        scheduled.queue_counts.num_ours -= 1
        self._refund(scheduled)
        if scheduled.suspicion.detector is not None:
            scheduled.suspicion.detector.report(scheduled.suspicion, progressed=True)
        self._context.job_table.remove(scheduled, error)
        if self._context.admission is not None:
            self._context.admission.left(scheduled)
        self._wake()

    def dispatch_ready(self) -> None:
        """Send what has room, in the order of the queue.

        One that is too large for what is free lets others go, but to other workers than the one
        that it waits for. One for whose tier there is no room lets those of higher tiers go.
        """
        preemption = self._preemption
        preemption.begin_round()
        placement_round = PlacementRound(self._context, self.model, preemption)
        while self._context.bus.connected and not self._stopped:
            scheduled = self.queue.head(preemption.above)
            if scheduled is None:
                break
            terminal_status = self._context.why_unwanted(scheduled)
            if terminal_status is not None:
                self.finish(scheduled, terminal_status)
            elif not preemption.may_go(scheduled):
                break
            elif (place := placement_round.find(scheduled)) is not None:
                self._send(scheduled, *place)
            elif (terminal_status := placement_round.too_long(scheduled)) is not None:
                self.finish(scheduled, terminal_status)
            elif placement_round.keep_for(scheduled):
                self.queue.pass_over(scheduled)
            else:
                preemption.hold_up(scheduled)
        preemption.end_round()
        self.queue.restore_passed()
        self._wake()

    def _send(self, scheduled: ScheduledJob, worker: WorkerView, num_cached_tokens: int) -> None:
        self.queue.remove(scheduled)
        scheduled.stop_waiting_here()
        scheduled.enter(Phase.DISPATCHING)
        scheduled.assign(worker.worker_id, num_cached_tokens)
        scheduled.service.charged_tokens = scheduled.service.tokens - num_cached_tokens
        self._preemption.has_turn(scheduled.job.tier)
        self.queue.charge(scheduled.tenant, scheduled.service.charged_tokens)
        self._context.fleet.reserve(
            worker.worker_id,
            scheduled.request_id,
            scheduled.resources,
            scheduled.service.output_tokens,
            num_cached_tokens,
        )
        self._context.tasks.spawn(self._dispatch(scheduled), f"dispatch {scheduled.request_id}")

    def _wake(self) -> None:
        for wake in self.wakes:
            wake.set()

    def _refund(self, scheduled: ScheduledJob) -> None:
        """The run that its tenant was charged for is no more; what it really took is told when it
        has ended."""
        if scheduled.service.charged_tokens:
            self.queue.charge(scheduled.tenant, -scheduled.service.charged_tokens)
            scheduled.service.charged_tokens = 0.0

    # --- ends ---

    def finish(
        self, scheduled: ScheduledJob, terminal_status: TerminalStatus, *, dead_letter: bool = False
    ) -> None:
        """Answer a job without a worker; it is nobody's but the queue's until that is done. One
        that has ended already is not ours to answer."""
        if scheduled.is_ended:
            return
        self._drop(scheduled, terminal_status.code)
        self._context.tasks.spawn(
            self._answer(scheduled, terminal_status, dead_letter=dead_letter),
            f"end {scheduled.request_id}",
        )

    async def _answer(
        self, scheduled: ScheduledJob, terminal_status: TerminalStatus, *, dead_letter: bool
    ) -> None:
        finalizer = self._context.finalizer
        try:
            await (
                finalizer.finish_dead(scheduled, terminal_status)
                if dead_letter
                else finalizer.finish(scheduled, terminal_status)
            )
        except BusUnavailableError as error:
            logger.warning(
                "a job will be answered when it is delivered again",
                extra={"request_id": scheduled.request_id, "reason": error.message},
            )

    def charge_served(self, served: Served, worker_id: str) -> None:
        """What a run really took, ours or not."""
        tokens = self._service(
            served.prompt_tokens - served.cached_tokens, served.completion_tokens
        )
        scheduled = self._context.job_table.get(served.request_id)
        if scheduled is not None and scheduled.worker_id == worker_id:
            self._refund(scheduled)
        elif scheduled is None:
            self._preemption.has_turn(served.tier)
        self.queue.charge(Tenant(served.tier, served.tenant), tokens)
        if served.completion_tokens:
            self.output_lengths.observe(served.tenant, served.completion_tokens)

    def complete(self, scheduled: ScheduledJob) -> None:
        """The worker is done with it: it leaves for good."""
        self._context.fleet.release(scheduled.worker_id, scheduled.request_id)
        self._drop(scheduled)

    def acknowledge(self, scheduled: ScheduledJob) -> None:
        """An earlier run ended it, though the queue does not know yet: do not run it again."""
        self.complete(scheduled)
        self._context.tasks.spawn(self._ack(scheduled), f"ack {scheduled.request_id}")

    def superseded(self, scheduled: ScheduledJob) -> None:
        """Somebody runs it at a higher epoch and holds the lease."""
        logger.info("another scheduler has the job", extra={"request_id": scheduled.request_id})
        self.complete(scheduled)

    async def _ack(self, scheduled: ScheduledJob) -> None:
        try:
            await self._context.bus.jobs.ack(scheduled.lease.token)
        except BusUnavailableError:
            logger.warning(
                "an answered job will be delivered again",
                extra={"request_id": scheduled.request_id},
            )

    # --- sending ---

    async def _dispatch(self, scheduled: ScheduledJob) -> None:
        await self._follow_up(scheduled, self._sender.send(scheduled, scheduled.worker_id))

    def continue_where_it_runs(self, scheduled: ScheduledJob, worker_id: str) -> None:
        """The queue delivered a job again that a live worker has: it goes on under the new lease,
        and if the worker does not have it after all, it is sent as any other."""
        fleet = self._context.fleet
        if scheduled.phase is Phase.PREPARING:
            self._prepared(scheduled)
        scheduled.stop_waiting_here()
        scheduled.enter(Phase.DISPATCHING)
        scheduled.assign(worker_id, 0)
        worker = fleet.get(worker_id)
        if worker is not None and scheduled.request_id not in worker.runs:
            fleet.reserve(
                worker_id,
                scheduled.request_id,
                scheduled.resources,
                scheduled.service.output_tokens,
            )
        going_on = self._follow_up(scheduled, self._sender.continue_at(scheduled, worker_id))
        self._context.tasks.spawn(going_on, f"continue {scheduled.request_id}")

    async def _follow_up(
        self, scheduled: ScheduledJob, sending: Coroutine[Any, Any, DispatchOutcome]
    ) -> None:
        clock, counts = self._context.clock, self.counts
        started_s = clock.monotonic()
        try:
            sent = await sending
        except BusUnavailableError:
            counts.dispatches["unsent"] += 1
            self._requeue(scheduled)
            return
        except Exception as error:
            # A bug here ends one job: it may not keep a worker's room and a lease for ever.
            logger.exception(
                "a job could not be dispatched", extra={"request_id": scheduled.request_id}
            )
            message = f"The job could not be dispatched: {type(error).__name__}."
            terminal_status = failed(MillraceError.code, message, retryable=False)
            sent = DispatchOutcome(DispatchResult.ENDS, terminal_status)
        counts.dispatches[sent.result.name.lower()] += 1
        counts.dispatch_s.add(clock.monotonic() - started_s)
        self._follow(scheduled, sent)

    def _follow(self, scheduled: ScheduledJob, sent: DispatchOutcome) -> None:
        fleet, worker_id = self._context.fleet, scheduled.worker_id
        if scheduled.phase is Phase.ENDED:
            fleet.release(worker_id, scheduled.request_id)
            self.dispatch_ready()
            return
        match sent.result:
            case DispatchResult.ACCEPTED:
                self._accepted(scheduled)
            case DispatchResult.REFUSED:
                self._requeue(scheduled)
                fleet.refuse(worker_id, scheduled.job.tier)
            case DispatchResult.LOST:
                self.attempt_lost(scheduled)
                fleet.refuse(worker_id)
            case DispatchResult.ANSWERED:
                self.acknowledge(scheduled)
            case DispatchResult.OVERTAKEN:
                self.superseded(scheduled)
            case DispatchResult.POISONOUS:
                fleet.release(worker_id, scheduled.request_id)
                self.finish(scheduled, poison_pill(), dead_letter=True)
            case DispatchResult.ENDS:
                assert sent.terminal_status is not None
                fleet.release(worker_id, scheduled.request_id)
                self.finish(scheduled, sent.terminal_status)
        self.dispatch_ready()

    def _accepted(self, scheduled: ScheduledJob) -> None:
        context = self._context
        worker = context.fleet.get(scheduled.worker_id)
        if worker is None:
            self.attempt_lost(scheduled)
            return
        if scheduled.request_id not in worker.runs:
            # It was silent for too long meanwhile, and came back without our reservations.
            worker.reserve(
                scheduled.request_id, scheduled.resources, scheduled.service.output_tokens
            )
        context.fleet.confirm(scheduled.worker_id, scheduled.request_id)
        scheduled.enter(Phase.RUNNING)
        if not scheduled.ran_before and scheduled.job.received_ns:
            queue_s = (context.clock.now_ns() - scheduled.job.received_ns) / 1e9
            self.counts.queue_s[scheduled.job.tier].add(max(0.0, queue_s))
        reason = context.cancels.reason(scheduled.request_id, context.clock.monotonic())
        if reason is not None:
            # The worker may have heard the cancel before the dispatch.
            cancel = Cancel(request_id=scheduled.request_id, reason=reason)
            context.tasks.spawn(
                context.bus.control.cancel(cancel), f"cancel {scheduled.request_id}"
            )

    def _requeue(self, scheduled: ScheduledJob) -> None:
        """It waits for room again: nothing ran there, or it is no more."""
        self._context.fleet.release(scheduled.worker_id, scheduled.request_id)
        self._refund(scheduled)
        scheduled.unassign("not_taken")
        if scheduled.phase is not Phase.ENDED:
            scheduled.enter(Phase.WAITING)
            scheduled.start_waiting_here()
            self.queue.push(scheduled)
            self.has_waiting.set()

    # --- workers that go ---

    def worker_died(self, scheduled_jobs: list[ScheduledJob]) -> None:
        """The worker that had these is gone without a word: run them again elsewhere, unless one
        of them is to blame."""
        PoisonPillDetector(scheduled.suspicion for scheduled in scheduled_jobs)
        for scheduled in scheduled_jobs:
            self.attempt_lost(scheduled)

    def attempt_lost(self, scheduled: ScheduledJob) -> None:
        """The worker that has it, or may have it, is gone: run it again elsewhere."""
        self.counts.reruns[Rerun.LOST] += 1
        scheduled.count_lost_attempt()
        if scheduled.attempts.num_lost >= self._context.config.max_attempts:
            self._context.fleet.release(scheduled.worker_id, scheduled.request_id)
            num_lost = scheduled.attempts.num_lost
            message = f"The request was given to {num_lost} workers and none answered it."
            self.finish(
                scheduled, failed("too_many_attempts", message, retryable=True), dead_letter=True
            )
            return
        self._requeue_interrupted(scheduled)

    def attempt_returned(self, scheduled: ScheduledJob) -> None:
        """The worker goes, and lets others go on with it."""
        self.counts.reruns[Rerun.RETURNED] += 1
        self._requeue_interrupted(scheduled)

    def _requeue_interrupted(self, scheduled: ScheduledJob) -> None:
        scheduled.interrupt("given_back")
        scheduled.timing.extended_s = float("-inf")
        terminal_status = self._context.why_unwanted(scheduled)
        if terminal_status is not None:
            self._context.fleet.release(scheduled.worker_id, scheduled.request_id)
            self.finish(scheduled, terminal_status)
            return
        self._requeue(scheduled)

    def migrate(self, worker: WorkerView) -> None:
        """Have others go on with what a worker runs that drains, or whose engine is down."""
        if not self._stopped and self._context.bus.connected:
            self._migration.begin(worker)

    def _migrate(self, scheduled: ScheduledJob, worker: WorkerView, num_cached_tokens: int) -> None:
        self._context.fleet.release(scheduled.worker_id, scheduled.request_id)
        self._refund(scheduled)
        scheduled.interrupt("moved")
        self.counts.reruns[Rerun.MOVED] += 1
        self._send(scheduled, worker, num_cached_tokens)

    # --- those who wait ---

    def finish_unwanted(self) -> None:
        """End what was cancelled or came too late while it waited."""
        for scheduled in self.queue:
            terminal_status = self._context.why_unwanted(scheduled)
            if terminal_status is not None:
                self.finish(scheduled, terminal_status)
        self.dispatch_ready()
