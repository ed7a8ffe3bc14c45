"""The end of jobs and of attempts: a job whose attempt came to nothing waits again, or ends."""

from __future__ import annotations

import logging
from collections.abc import Coroutine, Iterable
from typing import Any

from millrace.scheduler.jobs.finalizer import TerminalStatus, failed
from millrace.scheduler.jobs.scheduled_job import JobPhase, PoisonPillDetector, ScheduledJob
from millrace.scheduler.state import MovedBy, Rerun, SchedulerState
from millrace.schemas.errors import BusUnavailableError

logger = logging.getLogger(__name__)


# --- jobs ---


def complete(state: SchedulerState, scheduled: ScheduledJob, error: str = "") -> None:
    """Forget a job that is over here: it is answered, or another scheduler has it."""
    state.fleet.release(scheduled.worker_id, scheduled.request_id)
    if scheduled.is_ended:
        return
    model_queue = state.queue_of(scheduled)
    model_queue.queue.remove(scheduled)
    model_queue.queue.refund_attempt(scheduled)
    if scheduled.suspicion.detector is not None:
        scheduled.suspicion.detector.report(scheduled.suspicion, progressed=True)
    state.job_table.remove(scheduled, error)
    state.lines.leave(scheduled)
    if state.admission is not None:
        state.admission.release_local(scheduled)
    model_queue.wake_pulls()


def acknowledge(state: SchedulerState, scheduled: ScheduledJob) -> None:
    """End a job that an earlier attempt answered: the queue does not know of the answer yet."""
    complete(state, scheduled)
    state.tasks.spawn(_ack(state, scheduled), f"ack {scheduled.request_id}")


def superseded(state: SchedulerState, scheduled: ScheduledJob) -> None:
    """Forget a job that another scheduler runs at a higher epoch, with the lease."""
    logger.info("another scheduler has the job", extra={"request_id": scheduled.request_id})
    complete(state, scheduled)


def finish(
    state: SchedulerState,
    scheduled: ScheduledJob,
    terminal_status: TerminalStatus,
    *,
    dead_letter: bool = False,
) -> None:
    """Answer a job without a worker, unless it has ended. Until the answer is out, the queue alone
    has the job."""
    if scheduled.is_ended:
        return
    complete(state, scheduled, terminal_status.code)
    finalizer = state.finalizer
    answering = finalizer.finish_dead if dead_letter else finalizer.finish
    state.tasks.spawn(
        _answer(state, scheduled, answering(scheduled, terminal_status)),
        f"end {scheduled.request_id}",
    )


async def _answer(
    state: SchedulerState, scheduled: ScheduledJob, answering: Coroutine[Any, Any, None]
) -> None:
    try:
        await answering
        if scheduled.reservation is not None:
            state.lines.freed(scheduled.job.tenant)
    except BusUnavailableError as error:
        logger.warning(
            "a job will be answered when it is delivered again",
            extra={"request_id": scheduled.request_id, "reason": error.message},
        )


async def _ack(state: SchedulerState, scheduled: ScheduledJob) -> None:
    try:
        await state.bus.jobs.ack(scheduled.lease.token)
    except BusUnavailableError:
        logger.warning(
            "an answered job will be delivered again", extra={"request_id": scheduled.request_id}
        )


# --- attempts that came to nothing ---


def worker_died(state: SchedulerState, scheduled_jobs: Iterable[ScheduledJob]) -> None:
    """Run the jobs of a dead worker again elsewhere, except a job that is to blame."""
    PoisonPillDetector(scheduled.suspicion for scheduled in scheduled_jobs)
    for scheduled in scheduled_jobs:
        attempt_lost(state, scheduled)


def attempt_lost(state: SchedulerState, scheduled: ScheduledJob) -> None:
    """Run a job again elsewhere: the worker that has it, or may have it, is gone."""
    state.queue_of(scheduled).counts.reruns[Rerun.LOST] += 1
    scheduled.count_lost_attempt()
    num_lost = scheduled.attempts.num_lost
    if num_lost < state.config.max_attempts:
        _requeue_interrupted(state, scheduled)
        return
    message = f"The request was given to {num_lost} workers and none answered it."
    terminal_status = failed("too_many_attempts", message, retryable=True)
    finish(state, scheduled, terminal_status, dead_letter=True)


def attempt_returned(state: SchedulerState, scheduled: ScheduledJob) -> None:
    """Have another worker continue a job: its worker stops."""
    state.queue_of(scheduled).counts.reruns[Rerun.RETURNED] += 1
    _requeue_interrupted(state, scheduled)


def take_from_worker(state: SchedulerState, scheduled: ScheduledJob, *, has_source: bool) -> None:
    """End the attempt at a worker that loses the job to another one, which is chosen already.
    ``has_source``: the other worker pulls blocks of the KV cache."""
    worker_id = scheduled.worker_id
    model_queue = state.queue_of(scheduled)
    state.fleet.release(worker_id, scheduled.request_id)
    model_queue.queue.refund_attempt(scheduled)
    scheduled.interrupt("moved", worker_id)
    model_queue.counts.reruns[Rerun.MOVED] += 1
    model_queue.counts.moves[MovedBy.PULLED if has_source else MovedBy.COMPUTED] += 1


def _requeue_interrupted(state: SchedulerState, scheduled: ScheduledJob) -> None:
    scheduled.interrupt("given_back")
    scheduled.timing.extended_s = float("-inf")
    terminal_status = state.why_unwanted(scheduled)
    if terminal_status is not None:
        finish(state, scheduled, terminal_status)
    else:
        requeue(state, scheduled)


def requeue(state: SchedulerState, scheduled: ScheduledJob) -> None:
    """Have a job wait again: nothing runs at its worker."""
    model_queue = state.queue_of(scheduled)
    state.fleet.release(scheduled.worker_id, scheduled.request_id)
    model_queue.queue.refund_attempt(scheduled)
    scheduled.unassign("not_taken")
    if not scheduled.is_ended:
        scheduled.enter(JobPhase.WAITING)
        scheduled.start_waiting_here()
        model_queue.queue.push(scheduled)
        model_queue.has_waiting.set()
