"""Watch stage: ends, cancels, dead workers, deadlines, leases, and lookups of doubtful jobs."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence

from millrace.bus.worker_losses import publish_loss
from millrace.runtime.clock import until_beat_s
from millrace.runtime.tasks import Tasks, wait_or_sleep
from millrace.scheduler.fleet.fleet import Departed, Departure
from millrace.scheduler.jobs.scheduled_job import JobPhase, ScheduledJob
from millrace.scheduler.jobs.terminal_status import cancelled
from millrace.scheduler.stages import end, place
from millrace.scheduler.state import SchedulerState
from millrace.schemas.control import Cancel, CancelReason, Ended
from millrace.schemas.errors import BusUnavailableError
from millrace.schemas.records import LossCause, LossObserver, WorkerLossRecord

logger = logging.getLogger(__name__)

TICK_S = 0.1
# Interval while no job is here, when only silent workers need attention.
_REST_TICK_S = 0.5
# Jobs without news for this long are looked up in the queue.
_CHECK_AFTER_S = 30.0
_MAX_CHECKS_PER_TICK = 64
_NEVER_S = float("-inf")

_CAUSES = {
    Departure.RETIRED: LossCause.STOPPED,
    Departure.SILENT: LossCause.SILENT,
    Departure.RESTARTED: LossCause.REPLACED,
}


# --- events ---


def departed(state: SchedulerState, gone_workers: Sequence[Departed]) -> None:
    """Run the jobs of departed workers again, and use the free capacity."""
    if gone_workers:
        state.count_queue_soon()
    for gone in gone_workers:
        state.departures[gone.why] += 1
        logger.warning(
            "a worker is gone",
            extra={
                "worker_id": gone.worker_id,
                "why": gone.why.value,
                "num_requests": len(gone.request_ids),
            },
        )
        recording = publish_loss(state.bus, state.clock, _loss_of(gone))
        state.answers.spawn(recording, "record a lost worker")
        state.prefixes.drop(gone.worker_id)
        scheduled_jobs = [
            scheduled
            for request_id in gone.request_ids
            if (scheduled := state.job_table.get(request_id)) is not None
            and _runs_at(scheduled, gone.worker_id)
        ]
        for scheduled in scheduled_jobs:
            scheduled.attempts.close(state.clock.now_ns())
        if gone.why is Departure.RETIRED:
            for scheduled in scheduled_jobs:
                end.attempt_returned(state, scheduled)
        elif scheduled_jobs:
            end.worker_died(state, scheduled_jobs)
    place.dispatch_all(state)


def _loss_of(gone: Departed) -> WorkerLossRecord:
    """Make the record of a departed worker, the same in every scheduler."""
    status = gone.status
    return WorkerLossRecord(
        worker_id=gone.worker_id,
        name=gone.name,
        model=status.model,
        lost_ns=status.sent_ns,
        cause=_CAUSES[gone.why],
        observer=LossObserver.SCHEDULER,
        num_requests=status.num_running + status.num_waiting,
    )


def ended(state: SchedulerState, message: Ended) -> None:
    """Handle a worker's message about requests that it has ended or given back."""
    worker_id = message.worker_id
    worker = state.fleet.get(worker_id)
    model_queue = None if worker is None else state.model_queues.get(worker.status.model)
    for served in message.served:
        if model_queue is not None:
            place.charge_served(state, model_queue, served, worker_id)
        if (scheduled := state.job_table.get(served.request_id)) is not None:
            scheduled.attempts.add_report(served, worker_id, state.clock.now_ns())
    _free_places(state, message)
    released = frozenset(message.released)
    num_answered = 0
    for request_id in message.request_ids:
        scheduled = state.job_table.get(request_id)
        if scheduled is None:
            state.fleet.release(worker_id, request_id)
            num_answered += request_id not in released
        elif request_id in released:
            if _runs_at(scheduled, worker_id):
                end.attempt_returned(state, scheduled)
        elif _runs_at(scheduled, worker_id):
            end.complete(state, scheduled)
            num_answered += 1
        else:
            # A run that was thought lost or superseded may have answered it: look it up.
            check_soon(scheduled)
    if model_queue is not None:
        model_queue.throughput.add(num_answered, state.clock.monotonic())
        place.dispatch_ready(state, model_queue)


def _runs_at(scheduled: ScheduledJob, worker_id: str) -> bool:
    return scheduled.phase is JobPhase.RUNNING and scheduled.worker_id == worker_id


def _free_places(state: SchedulerState, message: Ended) -> None:
    """Free the places of ended requests in their tenants' limits.

    The worker names the tenants, except of requests that never ran.
    """
    tenants = {served.request_id: served.tenant for served in message.served}
    for request_id in message.request_ids:
        scheduled = state.job_table.get(request_id)
        tenant = tenants.get(request_id) or ("" if scheduled is None else scheduled.job.tenant)
        if tenant:
            state.lines.freed(tenant)


def cancel(state: SchedulerState, message: Cancel) -> None:
    """Record a cancel, and end its job if it waits here."""
    scheduled = state.job_table.get(message.request_id)
    if message.below_epoch is not None:
        # Another scheduler runs the job again, unless this cancel is our own.
        if scheduled is not None and scheduled.attempts.highest_epoch < message.below_epoch:
            end.superseded(state, scheduled)
        return
    if message.reason is CancelReason.SUPERSEDED:
        return
    state.cancels.add(message, state.clock.monotonic())
    if scheduled is None:
        state.kept_cancels.note(message)
        return
    if scheduled.phase not in (JobPhase.HELD, JobPhase.WAITING):
        return
    reason = state.cancel_reason(scheduled)
    if reason is not None:
        end.finish(state, scheduled, cancelled(reason))
        place.dispatch_ready(state, state.queue_of(scheduled))


def check_soon(scheduled: ScheduledJob) -> None:
    """Look up a job's state at the next tick."""
    scheduled.timing.checked_s = _NEVER_S


# --- periodic checks ---


class HealthMonitor:
    """Health monitor: checks all jobs and workers at each tick, less often while there is no
    job."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._tasks = Tasks()
        self._last_tick_s = state.clock.monotonic()
        self._interval_s = TICK_S
        self._was_disconnected = False

    async def run(self) -> None:
        """Run until cancelled."""
        try:
            while True:
                self.tick()
                await self._rest()
        finally:
            await self._tasks.close()

    async def _rest(self) -> None:
        clock, has_jobs = self._state.clock, self._state.job_table.has_jobs
        self._interval_s = TICK_S if has_jobs.is_set() else _REST_TICK_S
        sleep_s = until_beat_s(clock, self._interval_s)
        if has_jobs.is_set():
            await clock.sleep(sleep_s)
        else:
            await wait_or_sleep(has_jobs, clock, sleep_s)

    def reconnected(self) -> None:
        """Note a reconnection: heartbeats and ends were missed."""
        self._was_disconnected = True
        for scheduled in self._state.job_table:
            scheduled.timing.checked_s = _NEVER_S
            scheduled.timing.extended_s = _NEVER_S

    def tick(self) -> None:
        state, now_s = self._state, self._state.clock.monotonic()
        late_s = now_s - self._last_tick_s - self._interval_s
        self._last_tick_s = now_s
        if not state.bus.connected:
            self._was_disconnected = True
            return
        if self._was_disconnected or late_s > state.config.heartbeat_timeout_s / 2:
            # Heartbeats received meanwhile may not have been read yet.
            self._was_disconnected = False
            state.fleet.forgive(now_s)
        silent = state.fleet.expire(now_s)
        if silent:
            departed(state, silent)
        self._finish_unwanted()
        self._extend_leases(now_s)
        self._check_doubtful(now_s)

    def _finish_unwanted(self) -> None:
        for scheduled in list(self._state.lines.held()):
            terminal_status = self._state.why_unwanted(scheduled)
            if terminal_status is not None:
                end.finish(self._state, scheduled, terminal_status)
        for model_queue in self._state.all_queues():
            place.finish_unwanted(self._state, model_queue)

    # --- leases ---

    def _extend_leases(self, now_s: float) -> None:
        due = [
            scheduled
            for scheduled in self._state.job_table
            if scheduled.holds_lease
            and now_s - scheduled.timing.extended_s >= self._state.config.lease_extend_s
        ]
        for scheduled in due:
            scheduled.timing.extended_s = now_s
        if due:
            self._tasks.spawn(
                self._extend([scheduled.lease.token for scheduled in due]), "extend leases"
            )

    async def _extend(self, leases: Iterable[str]) -> None:
        try:
            for lease in leases:
                await self._state.bus.jobs.extend(lease)
        except BusUnavailableError as error:
            logger.warning("leases could not be extended", extra={"reason": error.message})

    # --- doubts ---

    def _check_doubtful(self, now_s: float) -> None:
        for worker in self._state.fleet.doubtful():
            worker.trust()
            for request_id in worker.runs:
                scheduled = self._state.job_table.get(request_id)
                if scheduled is not None:
                    check_soon(scheduled)
        due = [one for one in self._state.job_table if _is_due(one, now_s)]
        due = due[:_MAX_CHECKS_PER_TICK]
        for scheduled in due:
            scheduled.timing.checked_s = now_s
        if due:
            self._tasks.spawn(self._check(due), "look up requests")

    async def _check(self, scheduled_jobs: Collection[ScheduledJob]) -> None:
        try:
            for scheduled in scheduled_jobs:
                is_open = await self._state.bus.jobs.is_open(scheduled.lease.stream_sequence)
                if not is_open and scheduled.phase in (JobPhase.RUNNING, JobPhase.WAITING):
                    end.complete(self._state, scheduled)
                    place.dispatch_ready(self._state, self._state.queue_of(scheduled))
        except BusUnavailableError as error:
            for scheduled in scheduled_jobs:
                check_soon(scheduled)
            logger.warning("requests could not be looked up", extra={"reason": error.message})


def _is_due(scheduled: ScheduledJob, now_s: float) -> bool:
    """Return whether to look up if the job has ended."""
    checked_s = scheduled.timing.checked_s
    if scheduled.phase is JobPhase.RUNNING:
        return now_s - checked_s >= _CHECK_AFTER_S
    return scheduled.phase is JobPhase.WAITING and checked_s == _NEVER_S
