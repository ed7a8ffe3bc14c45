"""Sends one job to one worker, continuing what an earlier run began."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import NamedTuple

from msgspec.structs import replace

from millrace.scheduler.dispatch.context import SchedulerContext
from millrace.scheduler.dispatch.counts import DispatchResult
from millrace.scheduler.jobs.poison_pills import MAX_FAILURES
from millrace.scheduler.jobs.running_requests import last_worker
from millrace.scheduler.jobs.scheduled_job import ScheduledJob
from millrace.scheduler.jobs.terminal_status import TerminalStatus, cancelled, failed, refused
from millrace.schemas.control import Cancel, CancelReason, Dispatch, WorkerReply
from millrace.schemas.errors import PayloadTooLargeError

# How long an attempt waits for the report of the one before it, if that worker lives: it reports
# when its step is over.
_REPORT_TIMEOUT_S = 0.06

logger = logging.getLogger(__name__)


class DispatchOutcome(NamedTuple):
    result: DispatchResult
    terminal_status: TerminalStatus | None = None
    reason: str = ""


class Sender:
    """Speaks to workers, gateways and the index about one job; the runner acts on the outcome."""

    def __init__(self, context: SchedulerContext) -> None:
        self._bus = context.bus
        self._config = context.config
        self._clock = context.clock
        self._running_requests = context.running_requests
        self._fleet = context.fleet

    async def send(self, scheduled: ScheduledJob, worker_id: str) -> DispatchOutcome:
        """Dispatch to a worker; a job that ran before is taken away from whoever still runs it.

        Raises BusUnavailableError: nothing was sent.
        """
        epoch_before = scheduled.attempts.epoch
        if not scheduled.ran_before:
            scheduled.start_attempt(self._clock.monotonic())
            return await self._dispatch(scheduled, worker_id, epoch_before)
        if await last_worker(self._running_requests, scheduled) is None:
            return DispatchOutcome(DispatchResult.ANSWERED)
        if not await self._bus.jobs.is_open(scheduled.lease.stream_sequence):
            return DispatchOutcome(DispatchResult.ANSWERED)
        scheduled.start_attempt(self._clock.monotonic())
        await self._supersede(scheduled)
        return await self._continue(scheduled, worker_id, epoch_before)

    async def continue_at(self, scheduled: ScheduledJob, worker_id: str) -> DispatchOutcome:
        """Dispatch to the worker that is thought to run the job still: it goes on with it under
        the new lease. Raises BusUnavailableError: nothing was sent."""
        epoch_before = scheduled.attempts.epoch
        scheduled.start_attempt(self._clock.monotonic())
        sent = await self._continue(scheduled, worker_id, epoch_before)
        if sent.result is DispatchResult.MUST_END:
            await self._supersede(scheduled)
        return sent

    async def _supersede(self, scheduled: ScheduledJob) -> None:
        """Whoever runs it at an older epoch stops, and leaves the lease alone."""
        scheduled.attempts.claimed_epoch = scheduled.attempts.epoch
        await self._bus.control.cancel(
            Cancel(
                request_id=scheduled.request_id,
                reason=CancelReason.SUPERSEDED,
                below_epoch=scheduled.attempts.epoch,
            )
        )

    async def _continue(
        self, scheduled: ScheduledJob, worker_id: str, epoch_before: int
    ) -> DispatchOutcome:
        """Dispatch from where the client is."""
        job = scheduled.job
        point = None
        if job.reply:
            point = await self._bus.control.resume_point(
                job.reply, job.request_id, self._config.resume_timeout_s
            )
            if point is not None and not point.open:
                return DispatchOutcome(DispatchResult.MUST_END, cancelled(CancelReason.DISCONNECT))
            # There are no tokens of an embedding to resume behind, whatever the client says.
            read = () if point is None else point.token_ids
            scheduled.resume_after(read if job.pooling is None else ())
        awaited = scheduled.attempts.unreported_worker_id
        if awaited not in ("", worker_id) and self._fleet.get(awaited) is not None:
            await scheduled.attempts.wait_for_report(_REPORT_TIMEOUT_S)
        if scheduled.suspicion.detector is not None and await self._is_poison_pill(
            scheduled, is_heard=point is not None
        ):
            return DispatchOutcome(DispatchResult.POISON_PILL)
        scheduled.client.num_tokens_at_start = len(scheduled.client.token_ids)
        return await self._dispatch(scheduled, worker_id, epoch_before)

    async def _is_poison_pill(self, scheduled: ScheduledJob, *, is_heard: bool) -> bool:
        """Whether workers die of it, as far as is known once all jobs of the last one that died
        have been looked into."""
        suspicion, detector = scheduled.suspicion, scheduled.suspicion.detector
        assert detector is not None
        went_on = len(scheduled.client.token_ids) > scheduled.client.num_tokens_at_start
        # That no gateway answers says nothing about the job; nobody listens to some.
        is_unknown = bool(scheduled.job.reply) and not is_heard
        detector.report(suspicion, progressed=went_on or is_unknown)
        if suspicion.failures > 0 and not detector.closed.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2 * self._config.resume_timeout_s):
                    await detector.closed.wait()
        return suspicion.failures >= MAX_FAILURES

    async def _dispatch(
        self, scheduled: ScheduledJob, worker_id: str, epoch_before: int
    ) -> DispatchOutcome:
        job = scheduled.job
        if scheduled.trace is not None:
            traceparent = scheduled.trace.mark_sent(
                scheduled.attempts.epoch, len(scheduled.client.token_ids)
            )
            job = replace(job, traceparent=traceparent)
        sent_ns = self._clock.now_ns()
        scheduled.attempts.close(sent_ns)
        dispatch = Dispatch(
            job=job,
            epoch=scheduled.attempts.epoch,
            lease=scheduled.lease.token,
            resume_token_ids=scheduled.client.token_ids,
            lives=scheduled.attempts.earlier(worker_id),
            sent_ns=sent_ns,
            reservation=scheduled.reservation,
            adapter=scheduled.adapter,
            kv_source=scheduled.known_kv_source,
        )
        try:
            reply = await self._bus.control.command(
                worker_id, dispatch, self._config.dispatch_timeout_s
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
                "a dispatch did not take",
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
