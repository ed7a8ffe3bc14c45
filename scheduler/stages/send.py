"""Send stage: dispatches a job to a worker, which continues an earlier attempt's output."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from typing import Any, NamedTuple

from msgspec.structs import replace

from millrace.runtime.tracing import recorded_trace_id
from millrace.scheduler.jobs.running_requests import last_worker
from millrace.scheduler.jobs.scheduled_job import MAX_FAILURES, JobPhase, ScheduledJob
from millrace.scheduler.jobs.terminal_status import (
    TerminalStatus,
    cancelled,
    failed,
    poison_pill,
    refused,
)
from millrace.scheduler.stages import end
from millrace.scheduler.state import DispatchResult, SchedulerState
from millrace.schemas.control import Cancel, CancelReason, Dispatch, WorkerReply
from millrace.schemas.errors import BusUnavailableError, MillraceError, PayloadTooLargeError

# Time that an attempt waits for the previous worker's report, if that worker lives. The worker
# reports at the end of its step.
_REPORT_TIMEOUT_S = 0.06

logger = logging.getLogger(__name__)


class DispatchOutcome(NamedTuple):
    result: DispatchResult
    terminal_status: TerminalStatus | None = None
    reason: str = ""


async def send(state: SchedulerState, scheduled: ScheduledJob, worker_id: str) -> DispatchOutcome:
    """Dispatch to a worker. A job that ran before is first taken from any worker that runs it.

    Raises BusUnavailableError: nothing was sent.
    """
    epoch_before = scheduled.attempts.epoch
    if not scheduled.ran_before:
        scheduled.start_attempt(state.clock.monotonic())
        return await _dispatch(state, scheduled, worker_id, epoch_before)
    if await last_worker(state.running_requests, scheduled) is None:
        return DispatchOutcome(DispatchResult.ANSWERED)
    if not await state.bus.jobs.is_open(scheduled.lease.stream_sequence):
        return DispatchOutcome(DispatchResult.ANSWERED)
    scheduled.start_attempt(state.clock.monotonic())
    await _supersede(state, scheduled)
    return await _continue(state, scheduled, worker_id, epoch_before)


async def continue_at(
    state: SchedulerState, scheduled: ScheduledJob, worker_id: str
) -> DispatchOutcome:
    """Dispatch to the worker that is thought to run the job, to continue it under the new lease.

    Raises BusUnavailableError: nothing was sent.
    """
    epoch_before = scheduled.attempts.epoch
    scheduled.start_attempt(state.clock.monotonic())
    sent = await _continue(state, scheduled, worker_id, epoch_before)
    if sent.result is DispatchResult.MUST_END:
        await _supersede(state, scheduled)
    return sent


async def _supersede(state: SchedulerState, scheduled: ScheduledJob) -> None:
    """Stop any worker that runs the job at an older epoch. It leaves the lease alone."""
    scheduled.attempts.claimed_epoch = scheduled.attempts.epoch
    await state.bus.control.cancel(
        Cancel(
            request_id=scheduled.request_id,
            reason=CancelReason.SUPERSEDED,
            below_epoch=scheduled.attempts.epoch,
        )
    )


async def _continue(
    state: SchedulerState, scheduled: ScheduledJob, worker_id: str, epoch_before: int
) -> DispatchOutcome:
    """Dispatch a job behind the tokens that its client has."""
    job = scheduled.job
    point = None
    if job.reply:
        point = await state.bus.control.resume_point(
            job.reply, job.request_id, state.config.resume_timeout_s
        )
        if point is not None and not point.open:
            return DispatchOutcome(DispatchResult.MUST_END, cancelled(CancelReason.DISCONNECT))
        # An embedding has no tokens to resume behind. Ignore tokens that the client reports.
        read = () if point is None else point.token_ids
        scheduled.resume_after(read if job.pooling is None else ())
    awaited = scheduled.attempts.unreported_worker_id
    if awaited not in ("", worker_id) and state.fleet.get(awaited) is not None:
        await scheduled.attempts.wait_for_report(_REPORT_TIMEOUT_S)
    if scheduled.suspicion.detector is not None and await _is_poison_pill(
        state, scheduled, is_heard=point is not None
    ):
        return DispatchOutcome(DispatchResult.POISON_PILL)
    scheduled.client.num_tokens_at_start = len(scheduled.client.token_ids)
    return await _dispatch(state, scheduled, worker_id, epoch_before)


async def _is_poison_pill(
    state: SchedulerState, scheduled: ScheduledJob, *, is_heard: bool
) -> bool:
    """Return whether the job is a poison pill.

    Waits until the detector of the last dead worker has looked into all its jobs.
    """
    suspicion, detector = scheduled.suspicion, scheduled.suspicion.detector
    assert detector is not None
    went_on = len(scheduled.client.token_ids) > scheduled.client.num_tokens_at_start
    # A missing answer of a gateway is no evidence about the job. Some jobs have no reader.
    is_unknown = bool(scheduled.job.reply) and not is_heard
    detector.report(suspicion, progressed=went_on or is_unknown)
    if suspicion.failures > 0 and not detector.closed.is_set():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2 * state.config.resume_timeout_s):
                await detector.closed.wait()
    return suspicion.failures >= MAX_FAILURES


async def _dispatch(
    state: SchedulerState, scheduled: ScheduledJob, worker_id: str, epoch_before: int
) -> DispatchOutcome:
    job = scheduled.job
    if scheduled.trace is not None:
        traceparent = scheduled.trace.mark_sent(
            scheduled.attempts.epoch, len(scheduled.client.token_ids)
        )
        job = replace(job, traceparent=traceparent)
    sent_ns = state.clock.now_ns()
    scheduled.attempts.close(sent_ns)
    dispatch = Dispatch(
        job=job,
        epoch=scheduled.attempts.epoch,
        lease=scheduled.lease.token,
        resume_token_ids=scheduled.client.token_ids,
        attempts=scheduled.attempts.earlier(worker_id),
        sent_ns=sent_ns,
        reservation=scheduled.reservation,
        adapter=scheduled.adapter,
        kv_source=scheduled.known_kv_source,
    )
    try:
        reply = await state.bus.control.command(
            worker_id, dispatch, state.config.dispatch_timeout_s
        )
    except PayloadTooLargeError as error:
        return DispatchOutcome(DispatchResult.MUST_END, refused(error))
    sent = _read(reply)
    if sent.result is DispatchResult.REFUSED:
        scheduled.undo_attempt(epoch_before)
    elif sent.result in (DispatchResult.ACCEPTED, DispatchResult.LOST):
        is_accepted = sent.result is DispatchResult.ACCEPTED
        scheduled.attempts.add_sent(worker_id, sent_ns, is_accepted=is_accepted)
    if sent.result is not DispatchResult.ACCEPTED:
        logger.info(
            "a dispatch was not accepted",
            extra={
                "request_id": scheduled.request_id,
                "worker_id": worker_id,
                "epoch": scheduled.attempts.epoch,
                "result": sent.result.value,
                "reason": sent.reason,
            },
        )
    return sent


def _read(reply: WorkerReply | None) -> DispatchOutcome:
    if reply is None:
        return DispatchOutcome(DispatchResult.LOST)
    if reply.ok:
        return DispatchOutcome(DispatchResult.ACCEPTED)
    match reply.reason:
        case "full" | "draining":
            return DispatchOutcome(DispatchResult.REFUSED, reason=reply.reason)
        case "stale_epoch":
            return DispatchOutcome(DispatchResult.SUPERSEDED, reason=reply.reason)
        case "bad_request":
            terminal_status = failed("bad_request", reply.message, retryable=False)
            return DispatchOutcome(DispatchResult.MUST_END, terminal_status, reply.reason)
        case _:
            return DispatchOutcome(DispatchResult.LOST, reason=reply.reason)


# --- outcome ---


async def outcome_of(
    state: SchedulerState, scheduled: ScheduledJob, sending: Coroutine[Any, Any, DispatchOutcome]
) -> DispatchOutcome:
    """Wait for the outcome of a dispatch, and count it."""
    clock, counts = state.clock, state.queue_of(scheduled).counts
    started_s = clock.monotonic()
    try:
        outcome = await sending
    except BusUnavailableError:
        counts.dispatches[DispatchResult.UNSENT] += 1
        return DispatchOutcome(DispatchResult.UNSENT)
    except Exception as error:
        # A bug here ends this job. It must not hold a worker's capacity and a lease forever.
        logger.exception(
            "a job could not be dispatched", extra={"request_id": scheduled.request_id}
        )
        message = f"The job could not be dispatched: {type(error).__name__}."
        terminal_status = failed(MillraceError.code, message, retryable=False)
        outcome = DispatchOutcome(DispatchResult.MUST_END, terminal_status)
    counts.dispatches[outcome.result] += 1
    counts.dispatch_s.add(clock.monotonic() - started_s)
    return outcome


def apply(state: SchedulerState, scheduled: ScheduledJob, outcome: DispatchOutcome) -> None:
    """Act on the outcome of a dispatch: the job runs, waits again, or ends."""
    fleet, worker_id = state.fleet, scheduled.worker_id
    if outcome.result is DispatchResult.UNSENT:
        end.requeue(state, scheduled)
        return
    if scheduled.is_ended:
        fleet.release(worker_id, scheduled.request_id)
        return
    match outcome.result:
        case DispatchResult.ACCEPTED:
            accepted(state, scheduled)
        case DispatchResult.REFUSED:
            end.requeue(state, scheduled)
            fleet.refuse(worker_id, scheduled.job.tier)
        case DispatchResult.LOST:
            end.attempt_lost(state, scheduled)
            fleet.refuse(worker_id)
        case DispatchResult.ANSWERED:
            end.acknowledge(state, scheduled)
        case DispatchResult.SUPERSEDED:
            end.superseded(state, scheduled)
        case DispatchResult.POISON_PILL:
            end.finish(state, scheduled, poison_pill(), dead_letter=True)
        case DispatchResult.MUST_END:
            assert outcome.terminal_status is not None
            end.finish(state, scheduled, outcome.terminal_status)


def accepted(state: SchedulerState, scheduled: ScheduledJob) -> None:
    """Note that a worker runs a job, and send a pending cancel to it."""
    request_id = scheduled.request_id
    worker = state.fleet.get(scheduled.worker_id)
    if worker is None:
        end.attempt_lost(state, scheduled)
        return
    if request_id not in worker.runs:
        # The worker was silent for too long meanwhile, and came back without this reservation.
        worker.reserve(request_id, scheduled.resources, scheduled.service.output_tokens)
    worker.confirm(request_id)
    scheduled.enter(JobPhase.RUNNING)
    if not scheduled.ran_before and scheduled.job.received_ns:
        job = scheduled.job
        wait_s = max(0.0, (state.clock.now_ns() - job.received_ns) / 1e9)
        trace_id = recorded_trace_id(job.traceparent)
        state.queue_of(scheduled).counts.dispatch_wait_s[job.tier].add(wait_s, trace_id=trace_id)
    reason = state.cancel_reason(scheduled)
    if reason is not None:
        # The worker may have heard the cancel before the dispatch.
        cancel = Cancel(request_id=request_id, reason=reason)
        state.tasks.spawn(state.bus.control.cancel(cancel), f"cancel {request_id}")
