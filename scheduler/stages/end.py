"""Ends of jobs and attempts. A job whose attempt failed waits again or ends."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable

from msgspec.structs import replace

from millrace.bus import codec, subjects
from millrace.bus.jobs import decoding
from millrace.bus.jobs.ends import record_of, result_of
from millrace.registry.pricing import device_cost
from millrace.runtime.retry import doubling_delays, retry
from millrace.scheduler.jobs.scheduled_job import JobPhase, PoisonPillDetector, ScheduledJob
from millrace.scheduler.jobs.terminal_status import REPEATED, TerminalStatus, failed
from millrace.scheduler.state import MovedBy, Rerun, SchedulerState
from millrace.schemas.errors import BusUnavailableError, ModelNotFoundError
from millrace.schemas.jobs import DeadJob, Job, JobResult
from millrace.schemas.records import RequestRecord, sum_energy, sum_pulled

logger = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.05
_LONGEST_BACKOFF_S = 2.0


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
    """Acknowledge a job that an earlier attempt answered, as the queue does not know it yet."""
    complete(state, scheduled)
    state.tasks.spawn(_ack(state, scheduled), f"ack {scheduled.request_id}")


def superseded(state: SchedulerState, scheduled: ScheduledJob) -> None:
    """Forget a job that another scheduler runs at a higher epoch with the lease."""
    logger.info("another scheduler has the job", extra={"request_id": scheduled.request_id})
    complete(state, scheduled)


def finish(
    state: SchedulerState,
    scheduled: ScheduledJob,
    terminal_status: TerminalStatus,
    *,
    dead_letter: bool = False,
) -> None:
    """Answer a job without a worker, unless it has ended.

    Until the answer is sent, only the queue has the job.
    """
    if scheduled.is_ended:
        return
    complete(state, scheduled, terminal_status.code)
    answering = _answer_or_wait(state, scheduled, terminal_status, dead_letter=dead_letter)
    state.tasks.spawn(answering, f"end {scheduled.request_id}")


async def _answer_or_wait(
    state: SchedulerState,
    scheduled: ScheduledJob,
    terminal_status: TerminalStatus,
    *,
    dead_letter: bool,
) -> None:
    try:
        await answer(state, scheduled, terminal_status, dead_letter=dead_letter)
        if scheduled.reservation is not None:
            state.lines.freed(scheduled.job.tenant)
    except BusUnavailableError as error:
        logger.warning(
            "a job could not be answered; retrying at its redelivery",
            extra={"request_id": scheduled.request_id, "reason": error.message},
        )


async def _ack(state: SchedulerState, scheduled: ScheduledJob) -> None:
    try:
        await state.bus.jobs.ack(scheduled.lease.token)
    except BusUnavailableError:
        logger.warning(
            "an answered job was not acknowledged; it will be delivered again",
            extra={"request_id": scheduled.request_id},
        )


# --- answers ---


async def answer(
    state: SchedulerState,
    scheduled: ScheduledJob,
    terminal_status: TerminalStatus,
    *,
    dead_letter: bool = False,
) -> None:
    """Answer a job whose lease is ours: record, stored result, terminal frame, index entry, ack.

    ``dead_letter``: keep it among the dead letters.

    Until the ack the queue has the job. If this scheduler dies before, the job is delivered and
    answered again, and its record is recognized as a duplicate. The frame follows the steps that
    the bus confirms, as no later step would send it again: the bus is then known to be reachable.
    If the frame is lost all the same, the index tells its reader that the job has ended.

    Raises BusUnavailableError: the job will be delivered again.
    """
    job, epoch, now_ns = scheduled.job, scheduled.next_epoch, state.clock.now_ns()
    await state.bus.outbox.publish(_record(state, scheduled, terminal_status, now_ns))
    if state.traces is not None:
        state.traces.recorded(job, now_ns)
    if job.store_result:
        await state.bus.results.store(_result(job, terminal_status, now_ns))
    if state.admission is not None:
        await state.admission.release(scheduled)
    await state.bus.frames.answer(job, terminal_status.frame(epoch))
    await state.running_requests.finish(job.request_id, "", epoch)
    _count(state, job, terminal_status)
    logger.info(
        "ended without a worker",
        extra={
            "request_id": job.request_id,
            "model": job.model,
            "status": terminal_status.status.value,
            "code": terminal_status.code,
        },
    )
    if not dead_letter:
        await state.bus.jobs.ack(scheduled.lease.token)
        return
    dead = DeadJob(
        reason=terminal_status.code,
        message=terminal_status.message,
        subject=subjects.job(scheduled.lease.tenant_queue),
        payload=codec.encode_json(job) if job.frames_as_json else codec.encode(job),
        content_type=codec.JSON if job.frames_as_json else codec.MSGPACK,
        request_id=job.request_id,
        num_deliveries=scheduled.lease.num_deliveries,
        died_ns=state.clock.now_ns(),
    )
    await state.bus.jobs.dead_letter(dead, scheduled.lease.token)


async def answer_repeated(
    state: SchedulerState, job: Job, lease: str, *, awaits_result: bool, epoch: int = 0
) -> None:
    """Refuse a message that repeats the id of another job.

    The other job's record, result and index entry stay as they are. ``awaits_result``: the other
    job may still store a result. Readers that follow the other job drop a frame of epoch 0. Raises
    BusUnavailableError.
    """
    if job.store_result and not awaits_result:
        # A result that the other job stored stays.
        await state.bus.results.store(_result(job, REPEATED, state.clock.now_ns()))
    await state.bus.frames.answer(job, REPEATED.frame(epoch))
    await state.bus.jobs.ack(lease)
    logger.info("refused a repeated request id", extra={"request_id": job.request_id})


async def answer_shed(state: SchedulerState, job: Job, terminal_status: TerminalStatus) -> None:
    """Answer a job that was taken out of the queue.

    It exists only in this process, so each step is retried until it succeeds.
    """
    now_ns = state.clock.now_ns()
    _count(state, job, terminal_status)
    record = _unstarted(state, job, terminal_status, 0, now_ns)
    await _insist(state, lambda: state.bus.outbox.publish(record))
    if state.traces is not None:
        state.traces.recorded(job, now_ns)
    if job.store_result:
        result = _result(job, terminal_status, now_ns)
        await _insist(state, lambda: state.bus.results.store(result))
    await _insist(state, lambda: state.bus.frames.answer(job, terminal_status.frame(0)))
    await state.running_requests.finish(job.request_id, "", 0)


def _record(
    state: SchedulerState, scheduled: ScheduledJob, terminal_status: TerminalStatus, now_ns: int
) -> RequestRecord:
    """Make the record of a job.

    The tokens of its lost attempts are unknown, so its tenant is charged for none, and the row has
    no prompt tokens. The known device time of the attempts is recorded.
    """
    job = scheduled.job
    record = _unstarted(state, job, terminal_status, scheduled.next_epoch, now_ns)
    if not scheduled.attempts:
        return record
    scheduled.attempts.close(now_ns)
    attempts, prices = scheduled.attempts.earlier(), state.model_cache.prices(job.model)
    device_us = sum(attempt.device_us for attempt in attempts)
    pulled_tokens, kv_source = sum_pulled(attempts)
    return replace(
        record,
        prompt_tokens=0,
        attempts=attempts,
        device_us=device_us,
        device_cost=device_cost(prices, device_us),
        energy_j=sum_energy(attempt.energy_j for attempt in attempts),
        price_version=prices.version,
        pulled_tokens=pulled_tokens,
        kv_source=kv_source,
    )


def _unstarted(
    state: SchedulerState, job: Job, terminal_status: TerminalStatus, epoch: int, now_ns: int
) -> RequestRecord:
    """Make the record without amounts, in the currency of the model's price book."""
    record = record_of(job, terminal_status.status, terminal_status.code, epoch, now_ns)
    return replace(record, currency=state.model_cache.prices(job.model).currency)


def _result(job: Job, terminal_status: TerminalStatus, now_ns: int) -> JobResult:
    told = terminal_status
    return result_of(
        decoding.owner_of(job), told.status, told.code, told.message, now_ns, told.param
    )


def _count(state: SchedulerState, job: Job, terminal_status: TerminalStatus) -> None:
    """Count by model, except unknown names, of which clients can make up any number."""
    model = "" if terminal_status.code == ModelNotFoundError.code else job.model
    state.num_ended[model, terminal_status.status, terminal_status.code] += 1


async def _insist(state: SchedulerState, step: Callable[[], Awaitable[None]]) -> None:
    delays = doubling_delays(_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S)
    await retry(
        step,
        delays,
        state.clock.sleep,
        retried=lambda error: isinstance(error, BusUnavailableError),
    )


# --- failed attempts ---


def worker_died(state: SchedulerState, scheduled_jobs: Iterable[ScheduledJob]) -> None:
    """Run the jobs of a dead worker again elsewhere, except a poison pill."""
    PoisonPillDetector(scheduled.suspicion for scheduled in scheduled_jobs)
    for scheduled in scheduled_jobs:
        attempt_lost(state, scheduled)


def attempt_lost(state: SchedulerState, scheduled: ScheduledJob) -> None:
    """Run a job again elsewhere, as the worker that has or may have it is gone."""
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
    """Queue a job for another worker, as its worker stops."""
    state.queue_of(scheduled).counts.reruns[Rerun.RETURNED] += 1
    _requeue_interrupted(state, scheduled)


def take_from_worker(state: SchedulerState, scheduled: ScheduledJob, *, has_source: bool) -> None:
    """End the attempt at a worker that loses the job to another worker, which is already chosen.
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
    """Queue a job again, as nothing runs at its worker."""
    model_queue = state.queue_of(scheduled)
    state.fleet.release(scheduled.worker_id, scheduled.request_id)
    model_queue.queue.refund_attempt(scheduled)
    scheduled.unassign("not_taken")
    if not scheduled.is_ended:
        scheduled.enter(JobPhase.WAITING)
        scheduled.start_waiting_here()
        model_queue.queue.push(scheduled)
        model_queue.has_waiting.set()
