"""Answers jobs that no worker answers, in an order that loses nothing whenever we die."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Protocol

from msgspec.structs import replace

from bus import codec, subjects
from bus.api import Bus
from bus.jobs import decoding as intake
from bus.jobs.ends import record_of, result_of
from registry.pricing import PriceBook, device_cost
from runtime.clock import Clock
from scheduler.jobs.entry import Entry
from scheduler.jobs.limits import Door
from scheduler.jobs.terminal_status import Verdict
from scheduler.jobs.tracing import JobTraces
from schemas.errors import BusUnavailableError, ModelNotFoundError
from schemas.jobs import DeadJob, Job, JobResult
from schemas.records import RequestRecord, Status

logger = logging.getLogger(__name__)

NOBODY = ""
_FIRST_BACKOFF_S = 0.05
_LONGEST_BACKOFF_S = 2.0


class Generations(Protocol):
    """What is written into the index of who runs what."""

    async def finish(self, request_id: str, worker_id: str, epoch: int) -> None: ...


class Endings:
    """Record, stored result, terminal frame, a note in the index, then the ack. Until the ack the
    queue has the job: if we die before, it is delivered and answered again, and its record is known
    by then. The frame comes after what the bus confirms, because nobody could send it again: it
    goes out when the bus is known to be there. If it is lost all the same, the index tells its
    reader that there is nothing to wait for. ``num_ended`` counts by model, status and code."""

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        generations: Generations,
        prices: Callable[[str], PriceBook],
        traces: JobTraces | None = None,
        door: Door | None = None,
    ) -> None:
        """``prices`` of a model."""
        self._bus = bus
        self._clock = clock
        self._generations = generations
        self._prices = prices
        self._traces = traces
        self._door = door
        self.num_ended: Counter[tuple[str, Status, str]] = Counter()

    async def end(self, entry: Entry, verdict: Verdict) -> None:
        """Answer a job whose lease is ours. Raises BusUnavailableError: it will be delivered
        again."""
        await self._answer(entry, verdict)
        await self._bus.jobs.ack(entry.lease)

    async def give_up(self, entry: Entry, verdict: Verdict) -> None:
        """Answer a job that cannot be run, and keep it among the dead letters."""
        await self._answer(entry, verdict)
        dead = DeadJob(
            reason=verdict.code,
            message=verdict.message,
            subject=subjects.job(entry.line),
            payload=codec.encode(entry.job),
            request_id=entry.request_id,
            num_deliveries=entry.num_deliveries,
            died_ns=self._clock.now_ns(),
        )
        await self._bus.jobs.bury(dead, entry.lease)

    async def end_taken(self, job: Job, verdict: Verdict) -> None:
        """Answer a job that was taken out of the queue: it exists nowhere but here, so each step
        is tried until it succeeds."""
        now_ns = self._clock.now_ns()
        self._count(job, verdict)
        record = record_of(job, verdict.status, verdict.code, 0, now_ns)
        await self._insist(lambda: self._bus.outbox.publish(record))
        if self._traces is not None:
            self._traces.recorded(job, now_ns)
        if job.store_result:
            result = _result(job, verdict, now_ns)
            await self._insist(lambda: self._bus.results.store(result))
        await self._insist(lambda: self._tell(job, verdict, 0))
        await self._generations.finish(job.request_id, NOBODY, 0)

    async def _answer(self, entry: Entry, verdict: Verdict) -> None:
        job, epoch = entry.job, entry.next_epoch
        now_ns = self._clock.now_ns()
        await self._bus.outbox.publish(self._record(entry, verdict, now_ns))
        if self._traces is not None:
            self._traces.recorded(job, now_ns)
        if job.store_result:
            await self._bus.results.store(_result(job, verdict, now_ns))
        if self._door is not None:
            await self._door.give_back(entry)
        await self._tell(job, verdict, epoch)
        await self._generations.finish(job.request_id, NOBODY, epoch)
        self._count(job, verdict)
        logger.info(
            "ended without a worker",
            extra={
                "request_id": job.request_id,
                "model": job.model,
                "status": verdict.status.value,
                "code": verdict.code,
            },
        )

    def _record(self, entry: Entry, verdict: Verdict, now_ns: int) -> RequestRecord:
        """Nobody knows for sure how many tokens its lost runs made, so its tenant is charged for
        none; what is known of the time that they took was ours to pay."""
        job = entry.job
        record = record_of(job, verdict.status, verdict.code, entry.next_epoch, now_ns)
        if verdict.limit:
            record = replace(record, error_code=verdict.code)
        if not entry.lives:
            return record
        entry.lives.end(now_ns)
        lives, prices = entry.lives.before(), self._prices(job.model)
        device_us = sum(life.device_us for life in lives)
        return replace(
            record,
            lives=lives,
            device_us=device_us,
            device_cost=device_cost(prices, device_us),
            currency=prices.currency,
            price_version=prices.version,
        )

    def _count(self, job: Job, verdict: Verdict) -> None:
        """By model, but for names that nobody knows: anybody can make up more of them."""
        model = "" if verdict.code == ModelNotFoundError.code else job.model
        self.num_ended[model, verdict.status, verdict.code] += 1

    async def _tell(self, job: Job, verdict: Verdict, epoch: int) -> None:
        if job.reply:
            await self._bus.frames.publish(
                job.reply,
                [(job.request_id, verdict.frame(epoch))],
                batch=job.batch_frames,
                as_json=job.frames_as_json,
            )

    async def _insist(self, step: Callable[[], Awaitable[None]]) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while True:
            try:
                await step()
            except BusUnavailableError:
                await self._clock.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, _LONGEST_BACKOFF_S)
            else:
                return


def _result(job: Job, verdict: Verdict, now_ns: int) -> JobResult:
    owner = intake.owner_of(job)
    return result_of(owner, verdict.status, verdict.code, verdict.message, now_ns)
