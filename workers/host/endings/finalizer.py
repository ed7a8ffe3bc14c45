"""End of a request, step by step, so that a crash at any point loses nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from msgspec.structs import replace

from millrace.bus.tenancy.settling import Settlement, Settlements
from millrace.registry.pricing import PriceBook, prices_with
from millrace.runtime.retry import doubling_delays, retry
from millrace.schemas.engines import PROMISES
from millrace.schemas.errors import PayloadTooLargeError
from millrace.schemas.jobs import GATEWAY_SOURCES, JobResult
from millrace.schemas.records import RequestRecord
from millrace.schemas.tenants import to_nano
from millrace.workers.host.context import WorkerContext
from millrace.workers.host.endings.device_times import DeviceTimes
from millrace.workers.host.endings.records import (
    job_result,
    request_record,
    smaller_results,
    transcript_of,
    wants_transcript,
)
from millrace.workers.host.flusher import Flusher
from millrace.workers.host.generations.generation import Generation
from millrace.workers.host.leases import LeaseOwnership, Ownership

_FIRST_BACKOFF_S = 0.05
_LONGEST_BACKOFF_S = 2.0
_MAX_CONCURRENT = 256
# The client has its answer by then, so a record may wait to be sent with others.
_RECORD_LINGER_S = 0.02

logger = logging.getLogger(__name__)


class _NotOursError(Exception):
    """Request that another attempt owns, or may own."""

    def __init__(self, ownership: Ownership) -> None:
        super().__init__()
        self.ownership = ownership


class GenerationFinalizer:
    """Finalizer of generations whose last frames are posted.

    The steps are, in this order: result, transcript (if kept), record, charge to the tenant, ack.
    The record waits for the final device time. Without ``settlements`` nothing is charged.

    Each generation has its own task, so a slow one delays no other. A step that the bus refuses is
    retried until it succeeds. The lease is acknowledged after all other steps, so if the process
    dies in between, the job runs again and its record is not doubled. ``ownership`` confirms the
    lease before each step. If another attempt owns the request, ``on_lost`` is called. If ownership
    cannot be known, the lease lapses, the queue delivers the job again, and a delivery to this
    worker continues this ending.
    """

    def __init__(
        self,
        context: WorkerContext,
        flusher: Flusher,
        device_times: DeviceTimes,
        ownership: LeaseOwnership,
        on_acked: Callable[[Generation], None],
        on_lost: Callable[[Generation], None],
        settlements: Settlements | None = None,
    ) -> None:
        self._context = context
        self._bus = context.bus
        self._flusher = flusher
        self._device_times = device_times
        self._ownership = ownership
        self._on_acked = on_acked
        self._on_lost = on_lost
        self._settlements = settlements
        self._ending: dict[str, tuple[Generation, asyncio.Task[None]]] = {}
        self._slots = asyncio.Semaphore(_MAX_CONCURRENT)

    def __len__(self) -> int:
        return len(self._ending)

    def get(self, request_id: str) -> Generation | None:
        entry = self._ending.get(request_id)
        return None if entry is None else entry[0]

    def generations(self) -> list[Generation]:
        """Return the generations being finalized; their leases are still extended."""
        return [generation for generation, _ in self._ending.values()]

    def start(self, generation: Generation) -> None:
        """Finalize a generation. If it is being finalized already, continue under its current
        lease.
        """
        request_id = generation.request_id
        if request_id in self._ending:
            return
        task = asyncio.create_task(self._end(generation), name=f"end {request_id}")
        self._ending[request_id] = (generation, task)
        task.add_done_callback(lambda ended: self._forget(request_id, ended))

    def abandon(self, request_id: str) -> None:
        """Stop finalizing a request that another attempt answers, or will answer."""
        entry = self._ending.pop(request_id, None)
        if entry is not None:
            entry[1].cancel()

    def _prices_of(self, generation: Generation) -> PriceBook:
        """Return the adapter's price book, or the model's if the adapter has none. The model's
        device prices always apply.
        """
        prices = self._context.model.entry.prices
        adapter = generation.adapter
        return prices_with(prices, None if adapter is None else adapter.prices)

    def _forget(self, request_id: str, ended: asyncio.Task[None]) -> None:
        entry = self._ending.get(request_id)
        if entry is not None and entry[1] is ended:
            del self._ending[request_id]

    async def _end(self, generation: Generation) -> None:
        async with self._slots:
            try:
                await self._flusher.published()
                if generation.job.store_result:
                    await self._store_result(generation)
                if wants_transcript(generation):
                    await self._store_transcript(generation)
                await self._device_times.wait_reported(generation)
                await self._context.energy.read_before_first_end()
                record = request_record(
                    generation,
                    self._context.worker_id,
                    self._prices_of(generation),
                    PROMISES[self._context.config.engine.kind].cost_method,
                    self._context.model.tokenizer.tool_format,
                )
                await self._retry(
                    lambda: self._bus.outbox.publish(record, _RECORD_LINGER_S), generation
                )
                if generation.trace is not None:
                    generation.trace.record_published(generation)
                settlement = self._settlement(generation, record)
                if settlement is not None:
                    await self._retry(lambda: self._settle(settlement), generation)
                await self._retry(lambda: self._bus.jobs.ack(generation.lease.handle), generation)
                self._on_acked(generation)
            except _NotOursError as error:
                logger.warning(
                    "a request is not finalized here",
                    extra={
                        "request_id": generation.request_id,
                        "ownership": error.ownership.name.lower(),
                    },
                )
                if error.ownership is Ownership.LOST:
                    self._on_lost(generation)
            except Exception:
                # The lease lapses, and the job is delivered again.
                logger.exception(
                    "a request could not be finalized", extra={"request_id": generation.request_id}
                )

    def _settlement(self, generation: Generation, record: RequestRecord) -> Settlement | None:
        """Return the settlement of a generation; None if nothing is charged.

        A service's job settles its whole reservation. A gateway's job charges its cost only, since
        the gateway would not charge it if the gateway died.
        """
        job, reservation = generation.job, generation.lease.reservation
        settlement = Settlement(
            request_id=job.reservation_id,
            num_tokens=None,
            cost_nano=to_nano(record.cost),
            currency=record.currency,
            since_s=self._context.clock.monotonic(),
            job_id=job.request_id,
        )
        if reservation is None:
            is_charged = settlement.cost_nano > 0 and job.source in GATEWAY_SOURCES
            return settlement if is_charged else None
        usage = generation.usage()
        return replace(
            settlement,
            request_id=reservation.reservation_id,
            num_tokens=None if usage is None else usage.prompt_tokens + usage.completion_tokens,
            spent_keys=(reservation.spent_key,),
            remember=True,
            job_id="",
        )

    async def _settle(self, settlement: Settlement) -> None:
        """Settle once, however often the job ends.

        While Redis is unreachable, the settlement is retried in the background and the lease does
        not wait for it.
        """
        if self._settlements is not None:
            await self._settlements.settle(settlement)

    async def _store_transcript(self, generation: Generation) -> None:
        tokenizer = self._context.model.tokenizer
        transcript = await asyncio.to_thread(transcript_of, generation, tokenizer)
        try:
            await self._retry(lambda: self._bus.outbox.publish(transcript), generation)
        except PayloadTooLargeError as error:
            logger.warning(
                "a transcript is too large to be stored",
                extra={"request_id": generation.request_id, "reason": error.message},
            )

    async def _store_result(self, generation: Generation) -> None:
        result = job_result(generation)
        too_large = await self._try_to_store(result, generation)
        if too_large is None:
            return
        for smaller in smaller_results(result, too_large.message):
            if await self._try_to_store(smaller, generation) is None:
                return
        raise too_large

    async def _try_to_store(
        self, result: JobResult, generation: Generation
    ) -> PayloadTooLargeError | None:
        """Store a result. Return None on success, or the error if the bus will never accept it."""
        try:
            await self._retry(lambda: self._bus.results.store(result), generation)
        except PayloadTooLargeError as error:
            return error
        return None

    async def _retry(self, step: Callable[[], Awaitable[None]], generation: Generation) -> None:
        """Retry until ``step`` succeeds. Raises _NotOursError and errors that are not retryable."""

        async def confirmed_step() -> None:
            ownership = await self._ownership.confirm(generation)
            if ownership is not Ownership.HELD:
                raise _NotOursError(ownership)
            await step()

        def on_failure(error: Exception, delay_s: float) -> None:
            if delay_s == _FIRST_BACKOFF_S:
                logger.warning(
                    "the end of a request waits for the bus",
                    extra={"request_id": generation.request_id, "reason": str(error)},
                )

        delays = doubling_delays(_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S)
        await retry(confirmed_step, delays, self._context.clock.sleep, on_failure=on_failure)
