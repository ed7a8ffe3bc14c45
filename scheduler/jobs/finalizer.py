"""Answers jobs that no worker answers, in an order that loses nothing whenever we die."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable

from msgspec.structs import replace

from millrace.bus import codec, subjects
from millrace.bus.api import Bus
from millrace.bus.jobs import decoding
from millrace.bus.jobs.ends import record_of, result_of
from millrace.registry.pricing import PriceBook, device_cost
from millrace.runtime.clock import Clock
from millrace.runtime.retry import doubling_delays, retry
from millrace.scheduler.jobs.admission import JobAdmission
from millrace.scheduler.jobs.running_requests import RunningRequests
from millrace.scheduler.jobs.scheduled_job import ScheduledJob
from millrace.scheduler.jobs.terminal_status import REPEATED, TerminalStatus
from millrace.scheduler.jobs.tracing import JobTraces
from millrace.schemas.errors import BusUnavailableError, ModelNotFoundError
from millrace.schemas.jobs import DeadJob, Job, JobResult
from millrace.schemas.records import RequestRecord, Status, sum_energy, sum_pulled

logger = logging.getLogger(__name__)

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
