"""From the worker that was chosen for a job to the job's end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from millrace.runtime.tracing import recorded_trace_id
from millrace.scheduler.dispatch.context import SchedulerContext
from millrace.scheduler.dispatch.counts import DispatchCounts, DispatchResult, MovedBy, Rerun
from millrace.scheduler.dispatch.placement_round import Place
from millrace.scheduler.dispatch.sender import DispatchOutcome, Sender
from millrace.scheduler.jobs.poison_pills import PoisonPillDetector
from millrace.scheduler.jobs.scheduled_job import Phase, ScheduledJob
from millrace.scheduler.jobs.terminal_status import TerminalStatus, failed, poison_pill
from millrace.scheduler.queues.fair_queue import FairQueue
from millrace.schemas.control import Cancel
from millrace.schemas.errors import BusUnavailableError, MillraceError

logger = logging.getLogger(__name__)


class JobRunner:
    """Runs the jobs of one model on the workers that are chosen for them, attempt by attempt, and
    ends them.

    A job whose attempt came to nothing goes back into ``queue``; ``on_requeued`` says so.
    ``on_failed`` is called when a worker did not accept a dispatch, and ``on_removed`` when a job
    is over here.
    """

    def __init__(
        self,
        context: SchedulerContext,
        queue: FairQueue,
        on_requeued: Callable[[], None],
        on_failed: Callable[[], None],
        on_removed: Callable[[], None],
    ) -> None:
        self.counts = DispatchCounts()
        self._context = context
        self._queue = queue
        self._on_requeued = on_requeued
        self._on_failed = on_failed
        self._on_removed = on_removed
        self._sender = Sender(context)

    # --- dispatch ---

    def start(self, scheduled: ScheduledJob, place: Place) -> None:
        """Send a waiting job to its place."""
        worker_id = place.worker.worker_id
        self._assign(scheduled, worker_id, place)
        num_present_tokens = place.num_cached_tokens + place.num_pulled_tokens
        self._queue.charge_attempt(scheduled, num_present_tokens)
        sending = self._sender.send(scheduled, worker_id)
        name = f"dispatch {scheduled.request_id}"
        self._context.tasks.spawn(self._complete_dispatch(scheduled, sending), name)

    def continue_where_it_runs(self, scheduled: ScheduledJob, worker_id: str) -> None:
        """The queue delivered a job again that a live worker has: it goes on under the new lease,
        and if the worker does not have it after all, it is sent as any other."""
        worker = self._context.fleet.get(worker_id)
        self._assign(scheduled, worker_id, None if worker is None else Place(worker))
        sending = self._sender.continue_at(scheduled, worker_id)
        name = f"continue {scheduled.request_id}"
        self._context.tasks.spawn(self._complete_dispatch(scheduled, sending), name)

    def _assign(self, scheduled: ScheduledJob, worker_id: str, place: Place | None) -> None:
        """To a place at a worker, or to one that is not known here."""
        self._queue.remove(scheduled)
        scheduled.stop_waiting_here()
        scheduled.enter(Phase.DISPATCHING)
        if place is None:
            scheduled.assign(worker_id, 0)
            return
        scheduled.assign(worker_id, place.num_cached_tokens, place.kv_source)
        if scheduled.request_id not in place.worker.runs:
            place.worker.reserve(
                scheduled.request_id,
                scheduled.resources,
                scheduled.service.output_tokens,
                place.num_cached_tokens,
                place.num_pulled_tokens,
            )

    async def _complete_dispatch(
        self, scheduled: ScheduledJob, sending: Coroutine[Any, Any, DispatchOutcome]
    ) -> None:
        clock, counts = self._context.clock, self.counts
        started_s = clock.monotonic()
        try:
            outcome = await sending
        except BusUnavailableError:
            counts.dispatches[DispatchResult.UNSENT] += 1
            self._requeue(scheduled)
            return
        except Exception as error:
            # A bug here ends one job: it may not keep a worker's capacity and a lease for ever.
            logger.exception(
                "a job could not be dispatched", extra={"request_id": scheduled.request_id}
            )
            message = f"The job could not be dispatched: {type(error).__name__}."
            terminal_status = failed(MillraceError.code, message, retryable=False)
            outcome = DispatchOutcome(DispatchResult.MUST_END, terminal_status)
        counts.dispatches[outcome.result] += 1
        counts.dispatch_s.add(clock.monotonic() - started_s)
        self._apply(scheduled, outcome)
        if scheduled.phase is not Phase.RUNNING:
            self._on_failed()

    def _apply(self, scheduled: ScheduledJob, outcome: DispatchOutcome) -> None:
        fleet, worker_id = self._context.fleet, scheduled.worker_id
        if scheduled.is_ended:
            fleet.release(worker_id, scheduled.request_id)
            return
        match outcome.result:
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
            case DispatchResult.SUPERSEDED:
                self.superseded(scheduled)
            case DispatchResult.POISON_PILL:
                self.finish(scheduled, poison_pill(), dead_letter=True)
            case DispatchResult.MUST_END:
                assert outcome.terminal_status is not None
                self.finish(scheduled, outcome.terminal_status)

    def _accepted(self, scheduled: ScheduledJob) -> None:
        context, request_id = self._context, scheduled.request_id
        worker = context.fleet.get(scheduled.worker_id)
        if worker is None:
            self.attempt_lost(scheduled)
            return
        if request_id not in worker.runs:
            # It was silent for too long meanwhile, and came back without our reservations.
            worker.reserve(request_id, scheduled.resources, scheduled.service.output_tokens)
        worker.confirm(request_id)
        scheduled.enter(Phase.RUNNING)
        if not scheduled.ran_before and scheduled.job.received_ns:
            job = scheduled.job
            queue_s = max(0.0, (context.clock.now_ns() - job.received_ns) / 1e9)
            trace_id = recorded_trace_id(job.traceparent)
            self.counts.queue_s[job.tier].add(queue_s, trace_id=trace_id)
        reason = context.cancel_reason(scheduled)
        if reason is not None:
            # The worker may have heard the cancel before the dispatch.
            cancel = Cancel(request_id=request_id, reason=reason)
            context.tasks.spawn(context.bus.control.cancel(cancel), f"cancel {request_id}")

    # --- attempts that came to nothing ---

    def worker_died(self, scheduled_jobs: Iterable[ScheduledJob]) -> None:
        """The worker that had these is gone without a word: run them again elsewhere, unless one
        of them is to blame."""
        PoisonPillDetector(scheduled.suspicion for scheduled in scheduled_jobs)
        for scheduled in scheduled_jobs:
            self.attempt_lost(scheduled)

    def attempt_lost(self, scheduled: ScheduledJob) -> None:
        """The worker that has it, or may have it, is gone: run it again elsewhere."""
        self.counts.reruns[Rerun.LOST] += 1
        scheduled.count_lost_attempt()
        num_lost = scheduled.attempts.num_lost
        if num_lost < self._context.config.max_attempts:
            self._requeue_interrupted(scheduled)
            return
        message = f"The request was given to {num_lost} workers and none answered it."
        terminal_status = failed("too_many_attempts", message, retryable=True)
        self.finish(scheduled, terminal_status, dead_letter=True)

    def attempt_returned(self, scheduled: ScheduledJob) -> None:
        """The worker stops, and another one is to continue it."""
        self.counts.reruns[Rerun.RETURNED] += 1
        self._requeue_interrupted(scheduled)

    def take_from_worker(self, scheduled: ScheduledJob, *, has_source: bool) -> None:
        """Another worker, which is chosen already, is to continue it; ``has_source``: with blocks
        of its KV cache that are pulled."""
        worker_id = scheduled.worker_id
        self._context.fleet.release(worker_id, scheduled.request_id)
        self._queue.refund_attempt(scheduled)
        scheduled.interrupt("moved", worker_id)
        self.counts.reruns[Rerun.MOVED] += 1
        self.counts.moves[MovedBy.PULLED if has_source else MovedBy.COMPUTED] += 1

    def _requeue_interrupted(self, scheduled: ScheduledJob) -> None:
        scheduled.interrupt("given_back")
        scheduled.timing.extended_s = float("-inf")
        terminal_status = self._context.why_unwanted(scheduled)
        if terminal_status is not None:
            self.finish(scheduled, terminal_status)
        else:
            self._requeue(scheduled)

    def _requeue(self, scheduled: ScheduledJob) -> None:
        """It waits again: nothing ran at the worker, or it is no more."""
        self._context.fleet.release(scheduled.worker_id, scheduled.request_id)
        self._queue.refund_attempt(scheduled)
        scheduled.unassign("not_taken")
        if not scheduled.is_ended:
            scheduled.enter(Phase.WAITING)
            scheduled.start_waiting_here()
            self._queue.push(scheduled)
            self._on_requeued()

    # --- ends ---

    def complete(self, scheduled: ScheduledJob, error: str = "") -> None:
        """It is over here, wherever it was: answered, or somebody else's."""
        context = self._context
        context.fleet.release(scheduled.worker_id, scheduled.request_id)
        if scheduled.is_ended:
            return
        self._queue.remove(scheduled)
        self._queue.refund_attempt(scheduled)
        if scheduled.suspicion.detector is not None:
            scheduled.suspicion.detector.report(scheduled.suspicion, progressed=True)
        context.job_table.remove(scheduled, error)
        context.lines.leave(scheduled)
        if context.admission is not None:
            context.admission.release_local(scheduled)
        self._on_removed()

    def acknowledge(self, scheduled: ScheduledJob) -> None:
        """An earlier attempt answered it, though the queue does not know yet: do not run it
        again."""
        self.complete(scheduled)
        self._context.tasks.spawn(self._ack(scheduled), f"ack {scheduled.request_id}")

    def superseded(self, scheduled: ScheduledJob) -> None:
        """Somebody runs it at a higher epoch and holds the lease."""
        logger.info("another scheduler has the job", extra={"request_id": scheduled.request_id})
        self.complete(scheduled)

    def finish(
        self, scheduled: ScheduledJob, terminal_status: TerminalStatus, *, dead_letter: bool = False
    ) -> None:
        """Answer a job without a worker; it is nobody's but the queue's until that is done. One
        that has ended already is not ours to answer."""
        if scheduled.is_ended:
            return
        self.complete(scheduled, terminal_status.code)
        finalizer = self._context.finalizer
        answering = finalizer.finish_dead if dead_letter else finalizer.finish
        self._context.tasks.spawn(
            self._answer(scheduled, answering(scheduled, terminal_status)),
            f"end {scheduled.request_id}",
        )

    async def _answer(self, scheduled: ScheduledJob, answering: Coroutine[Any, Any, None]) -> None:
        try:
            await answering
            if scheduled.reservation is not None:
                self._context.lines.freed(scheduled.job.tenant)
        except BusUnavailableError as error:
            logger.warning(
                "a job will be answered when it is delivered again",
                extra={"request_id": scheduled.request_id, "reason": error.message},
            )

    async def _ack(self, scheduled: ScheduledJob) -> None:
        try:
            await self._context.bus.jobs.ack(scheduled.lease.token)
        except BusUnavailableError:
            logger.warning(
                "an answered job will be delivered again",
                extra={"request_id": scheduled.request_id},
            )
