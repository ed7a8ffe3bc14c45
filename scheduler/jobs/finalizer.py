"""Answers jobs that no worker answers, in an order that loses nothing whenever we die."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator

import msgspec
from msgspec.structs import replace

from millrace.bus import codec, subjects
from millrace.bus.api import Bus
from millrace.bus.jobs import decoding
from millrace.bus.jobs.ends import record_of, result_of
from millrace.bus.tenancy.errors import RATE_LIMIT_ERRORS, RateLimitError
from millrace.registry.pricing import PriceBook, device_cost
from millrace.runtime.clock import Clock
from millrace.runtime.retry import doubling_delays, retry
from millrace.scheduler.jobs.admission import JobAdmission
from millrace.scheduler.jobs.running_requests import RunningRequests
from millrace.scheduler.jobs.scheduled_job import ScheduledJob
from millrace.scheduler.jobs.tracing import JobTraces
from millrace.schemas.control import CancelReason
from millrace.schemas.errors import (
    BusUnavailableError,
    ContextLengthError,
    MalformedMessageError,
    MillraceError,
    ModelNotFoundError,
    ParameterError,
)
from millrace.schemas.frames import Cancelled, Expired, Failed, Shed, TerminalFrame
from millrace.schemas.jobs import DeadJob, Job, JobResult, Tier
from millrace.schemas.records import RequestRecord, Status, sum_energy, sum_pulled

logger = logging.getLogger(__name__)

_RETRY_OVER_LIMIT_S = 5.0
_WITH_PARAM = (ParameterError, ContextLengthError, MalformedMessageError)


class TerminalStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Why a job ends here. ``retryable`` and ``retry_after_s`` are for whoever asked; ``limit`` is
    the one of its tenant that it is over, if that is why, ``param`` the field at fault, if one
    is."""

    status: Status
    code: str = ""
    message: str = ""
    retryable: bool = False
    retry_after_s: float = 0.0
    limit: str = ""
    param: str = ""

    def frame(self, epoch: int) -> TerminalFrame:
        match self.status:
            case Status.CANCELLED:
                reason = self.code if self.code == CancelReason.ORPHANED.value else ""
                return Cancelled(epoch=epoch, reason=reason)
            case Status.EXPIRED:
                return Expired(epoch=epoch)
            case Status.SHED:
                return Shed(
                    epoch=epoch,
                    retry_after_s=self.retry_after_s,
                    code=self.code,
                    limit=self.limit,
                    message=self.message if self.limit else "",
                )
            case _:
                return Failed(
                    epoch=epoch,
                    code=self.code,
                    message=self.message,
                    retryable=self.retryable,
                    param=self.param,
                )


EXPIRED = TerminalStatus(
    status=Status.EXPIRED, code="deadline_exceeded", message="The deadline passed before the end."
)


REPEATED = TerminalStatus(
    status=Status.FAILED,
    code="duplicate",
    message="Another job has this request_id: it waits, runs, or has ended, perhaps refused. "
    "This one was not run. Publish it under a request_id of its own.",
)


def cancelled(reason: CancelReason) -> TerminalStatus:
    """It is not wanted any more."""
    if reason is CancelReason.DEADLINE:
        return EXPIRED
    if reason is CancelReason.ORPHANED:
        return TerminalStatus(
            status=Status.CANCELLED,
            code=reason.value,
            message="The request's gateway was gone, and no client came back for it.",
        )
    return TerminalStatus(
        status=Status.CANCELLED, code="cancelled", message="The request was cancelled."
    )


def shed(retry_after_s: float) -> TerminalStatus:
    return TerminalStatus(
        status=Status.SHED,
        code="queue_full",
        message=f"The queue is full. Try again in {retry_after_s:.1f} s.",
        retryable=True,
        retry_after_s=retry_after_s,
    )


def over_limit(error: RateLimitError) -> TerminalStatus:
    """Its tenant uses as much as it may: for now, or for this month, or for ever."""
    return TerminalStatus(
        status=Status.SHED if error.comes_back else Status.FAILED,
        code=error.code,
        message=error.message,
        retryable=error.comes_back,
        retry_after_s=error.retry_after_s or 0.0,
        limit=error.limit,
    )


def over_waiting_jobs(tenant: str, tier: Tier, bound: int) -> TerminalStatus:
    """Its tenant has as many published jobs waiting as it may."""
    return TerminalStatus(
        status=Status.SHED,
        code="max_waiting_jobs",
        message=f"Limit max_waiting_jobs of tenant {tenant} reached: {bound} jobs wait in tier "
        f"{tier.value}. Publish more when some of them have ended.",
        retryable=True,
        retry_after_s=_RETRY_OVER_LIMIT_S,
        limit="max_waiting_jobs",
    )


def too_slow(predicted_s: float, bound_s: float) -> TerminalStatus:
    """The first token would come later than the tier's bound."""
    return TerminalStatus(
        status=Status.SHED,
        code="overloaded",
        message=f"The first token is predicted in {predicted_s:.1f} s, later than the "
        f"{bound_s:.1f} s that this tier waits.",
        retryable=True,
        retry_after_s=max(predicted_s - bound_s, 0.5),
    )


def poison_pill() -> TerminalStatus:
    """Workers died of it."""
    return TerminalStatus(
        status=Status.FAILED,
        code="poison",
        message="The workers that ran this request died before its next token, so it is not run "
        "again. Change the request before sending it again.",
    )


def refused(error: MillraceError) -> TerminalStatus:
    """The job itself is at fault, or its model cannot be served at all."""
    return TerminalStatus(
        status=Status.FAILED,
        code=error.code,
        message=error.message,
        retryable=error.retryable,
        param=error.param if isinstance(error, _WITH_PARAM) else "",
    )


def failed(code: str, message: str, *, retryable: bool) -> TerminalStatus:
    return TerminalStatus(status=Status.FAILED, code=code, message=message, retryable=retryable)


def _foreseen() -> Iterator[TerminalStatus]:
    yield from (EXPIRED, REPEATED, poison_pill(), shed(0.0), too_slow(0.0, 0.0))
    yield from (cancelled(reason) for reason in CancelReason)
    yield over_waiting_jobs("", Tier.FREE, 0)
    for kind in RATE_LIMIT_ERRORS.values():
        for status in (Status.SHED, Status.FAILED):
            yield TerminalStatus(status=status, code=kind.code)


# Status and code of each end that is no job's own fault.
FORESEEN_ENDS = frozenset((one.status, one.code) for one in _foreseen())


NOBODY = ""
_FIRST_BACKOFF_S = 0.05
_LONGEST_BACKOFF_S = 2.0


class JobFinalizer:
    """Record, stored result, terminal frame, a note in the index, then the ack. Until the ack the
    queue has the job: if we die before, it is delivered and answered again, and its record is known
    by then. The frame comes after what the bus confirms, because nobody could send it again: it
    goes out when the bus is known to be there. If it is lost all the same, the index tells its
    reader that there is nothing to wait for. ``num_ended`` counts by model, status and code."""

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        running_requests: RunningRequests,
        prices: Callable[[str], PriceBook],
        traces: JobTraces | None = None,
        admission: JobAdmission | None = None,
    ) -> None:
        """``prices`` of a model."""
        self._bus = bus
        self._clock = clock
        self._running_requests = running_requests
        self._prices = prices
        self._traces = traces
        self._admission = admission
        self.num_ended: Counter[tuple[str, Status, str]] = Counter()

    async def finish(self, scheduled: ScheduledJob, terminal_status: TerminalStatus) -> None:
        """Answer a job whose lease is ours. Raises BusUnavailableError: it will be delivered
        again."""
        await self._answer(scheduled, terminal_status)
        await self._bus.jobs.ack(scheduled.lease.token)

    async def finish_dead(self, scheduled: ScheduledJob, terminal_status: TerminalStatus) -> None:
        """Answer a job that cannot be run, and keep it among the dead letters."""
        await self._answer(scheduled, terminal_status)
        as_json = scheduled.job.frames_as_json
        encode = codec.encode_json if as_json else codec.encode
        dead = DeadJob(
            reason=terminal_status.code,
            message=terminal_status.message,
            subject=subjects.job(scheduled.lease.tenant_queue),
            payload=encode(scheduled.job),
            content_type=codec.JSON if as_json else codec.MSGPACK,
            request_id=scheduled.request_id,
            num_deliveries=scheduled.lease.num_deliveries,
            died_ns=self._clock.now_ns(),
        )
        await self._bus.jobs.dead_letter(dead, scheduled.lease.token)

    async def finish_repeated(
        self, job: Job, lease: str, *, awaits_result: bool, epoch: int = 0
    ) -> None:
        """Refuse a message that repeats the id of another job, whose record, result and place in
        the index stay as they are; ``awaits_result``: the other may store one yet. A frame of the
        epoch 0 is dropped by a reader who follows the other job. Raises BusUnavailableError."""
        if job.store_result and not awaits_result:
            # One that the other stored before stays.
            await self._bus.results.store(_result(job, REPEATED, self._clock.now_ns()))
        await self._publish_frame(job, REPEATED, epoch)
        await self._bus.jobs.ack(lease)
        logger.info("a request id came again", extra={"request_id": job.request_id})

    async def finish_shed(self, job: Job, terminal_status: TerminalStatus) -> None:
        """Answer a job that was taken out of the queue: it exists nowhere but here, so each step
        is tried until it succeeds."""
        now_ns = self._clock.now_ns()
        self._count(job, terminal_status)
        record = self._unstarted(job, terminal_status, 0, now_ns)
        await self._insist(lambda: self._bus.outbox.publish(record))
        if self._traces is not None:
            self._traces.recorded(job, now_ns)
        if job.store_result:
            result = _result(job, terminal_status, now_ns)
            await self._insist(lambda: self._bus.results.store(result))
        await self._insist(lambda: self._publish_frame(job, terminal_status, 0))
        await self._running_requests.finish(job.request_id, NOBODY, 0)

    async def _answer(self, scheduled: ScheduledJob, terminal_status: TerminalStatus) -> None:
        job, epoch = scheduled.job, scheduled.next_epoch
        now_ns = self._clock.now_ns()
        await self._bus.outbox.publish(self._record(scheduled, terminal_status, now_ns))
        if self._traces is not None:
            self._traces.recorded(job, now_ns)
        if job.store_result:
            await self._bus.results.store(_result(job, terminal_status, now_ns))
        if self._admission is not None:
            await self._admission.release(scheduled)
        await self._publish_frame(job, terminal_status, epoch)
        await self._running_requests.finish(job.request_id, NOBODY, epoch)
        self._count(job, terminal_status)
        logger.info(
            "ended without a worker",
            extra={
                "request_id": job.request_id,
                "model": job.model,
                "status": terminal_status.status.value,
                "code": terminal_status.code,
            },
        )

    def _record(
        self, scheduled: ScheduledJob, terminal_status: TerminalStatus, now_ns: int
    ) -> RequestRecord:
        """Nobody knows for sure how many tokens its lost runs made, so its tenant is charged for
        none, and the row has no prompt tokens; what is known of the time that they took was ours to
        pay."""
        job = scheduled.job
        record = self._unstarted(job, terminal_status, scheduled.next_epoch, now_ns)
        if not scheduled.attempts:
            return record
        scheduled.attempts.close(now_ns)
        attempts, prices = scheduled.attempts.earlier(), self._prices(job.model)
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
        self, job: Job, terminal_status: TerminalStatus, epoch: int, now_ns: int
    ) -> RequestRecord:
        """The record without amounts, in the currency of the model's price book."""
        record = record_of(job, terminal_status.status, terminal_status.code, epoch, now_ns)
        return replace(record, currency=self._prices(job.model).currency)

    def _count(self, job: Job, terminal_status: TerminalStatus) -> None:
        """By model, but for names that nobody knows: anybody can make up more of them."""
        model = "" if terminal_status.code == ModelNotFoundError.code else job.model
        self.num_ended[model, terminal_status.status, terminal_status.code] += 1

    async def _publish_frame(self, job: Job, terminal_status: TerminalStatus, epoch: int) -> None:
        if job.reply:
            await self._bus.frames.publish(
                job.reply,
                [(job.request_id, terminal_status.frame(epoch))],
                batch=job.batch_frames,
                as_json=job.frames_as_json,
            )

    async def _insist(self, step: Callable[[], Awaitable[None]]) -> None:
        delays = doubling_delays(_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S)
        await retry(step, delays, self._clock.sleep, retried=_is_unavailable)


def _is_unavailable(error: Exception) -> bool:
    return isinstance(error, BusUnavailableError)


def _result(job: Job, terminal_status: TerminalStatus, now_ns: int) -> JobResult:
    owner = decoding.owner_of(job)
    return result_of(
        owner,
        terminal_status.status,
        terminal_status.code,
        terminal_status.message,
        now_ns,
        terminal_status.param,
    )
