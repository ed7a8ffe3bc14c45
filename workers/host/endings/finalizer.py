"""The end of a request, step by step, so that nothing is lost whenever the process dies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from bus.api import Bus
from bus.tenancy.settling import Settlement, Settlements
from runtime.clock import Clock
from runtime.retry import doubling_delays, retry
from schemas.errors import PayloadTooLargeError
from schemas.jobs import JobResult
from schemas.records import RequestRecord, TranscriptRecord
from schemas.tenants import to_nano
from workers.host.endings.records import job_result, smaller_results
from workers.host.flusher import Flusher
from workers.host.generations.generation import Generation
from workers.host.leases.ownership import Standing

_FIRST_BACKOFF_S = 0.05
_LONGEST_BACKOFF_S = 2.0
_MAX_CONCURRENT = 256
# A client has its answer by then: what a record waits for others costs nobody anything.
_RECORD_PATIENCE_S = 0.02

logger = logging.getLogger(__name__)


class _NotOursError(Exception):
    """Another run has the request, or may have it."""

    def __init__(self, standing: Standing) -> None:
        super().__init__()
        self.standing = standing


class Endings:
    """Ends generations whose last frames are posted: result, transcript if it is to be kept,
    record, what was set aside of its tenant's limits, ack, in this order. The record waits for
    ``device_time_told``. Without ``settlements`` nothing is settled.

    A task each, so that a slow one delays no other; a step that the bus refuses is tried again
    until it succeeds. The lease is acknowledged only when all before it is stored, so a process
    that dies in between leaves the job to be done again, and its record is not doubled. Before each
    step ``confirm`` says whether the request is still ours. If it is another's, ``on_lost`` is
    called; if nobody can say, the lease is left to lapse: the queue delivers the job again then,
    and whoever gets it here goes on with this ending.
    """

    def __init__(
        self,
        bus: Bus,
        flusher: Flusher,
        clock: Clock,
        make_record: Callable[[Generation], RequestRecord],
        make_transcript: Callable[[Generation], Awaitable[TranscriptRecord | None]],
        device_time_told: Callable[[Generation], Awaitable[None]],
        confirm: Callable[[Generation], Awaitable[Standing]],
        on_acked: Callable[[Generation], None],
        on_lost: Callable[[Generation], None],
        settlements: Settlements | None = None,
    ) -> None:
        self._bus = bus
        self._flusher = flusher
        self._clock = clock
        self._make_record = make_record
        self._make_transcript = make_transcript
        self._device_time_told = device_time_told
        self._confirm = confirm
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
        """Those that are ending; their leases are still held."""
        return [generation for generation, _ in self._ending.values()]

    def begin(self, generation: Generation) -> None:
        """End a generation; if it is ending already it goes on, with the lease that it has now."""
        request_id = generation.request_id
        if request_id in self._ending:
            return
        task = asyncio.create_task(self._end(generation), name=f"end {request_id}")
        self._ending[request_id] = (generation, task)
        task.add_done_callback(lambda ended: self._forget(request_id, ended))

    def abandon(self, request_id: str) -> None:
        """Stop ending a request: another run answers it, or will."""
        entry = self._ending.pop(request_id, None)
        if entry is not None:
            entry[1].cancel()

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
                transcript = await self._make_transcript(generation)
                if transcript is not None:
                    await self._keep(transcript, generation)
                await self._device_time_told(generation)
                record = self._make_record(generation)
                await self._insist(
                    lambda: self._bus.outbox.publish(record, _RECORD_PATIENCE_S), generation
                )
                if generation.trace is not None:
                    generation.trace.record_published(generation)
                if generation.reservation is not None:
                    await self._insist(lambda: self._settle(generation, record), generation)
                await self._insist(lambda: self._bus.jobs.ack(generation.lease), generation)
                self._on_acked(generation)
            except _NotOursError as error:
                logger.warning(
                    "a request is not ended here",
                    extra={
                        "request_id": generation.request_id,
                        "standing": error.standing.name.lower(),
                    },
                )
                if error.standing is Standing.LOST:
                    self._on_lost(generation)
            except Exception:
                # The lease lapses, and the job is delivered again.
                logger.exception(
                    "a request could not be ended", extra={"request_id": generation.request_id}
                )

    async def _settle(self, generation: Generation, record: RequestRecord) -> None:
        """Once, whoever ends the job how often: it is remembered. While Redis is away it is tried
        again in the background, which the lease does not wait for."""
        reservation = generation.reservation
        if reservation is None or self._settlements is None:
            return
        num_tokens = record.prompt_tokens + record.completion_tokens
        await self._settlements.settle(
            Settlement(
                request_id=reservation.reservation_id,
                num_tokens=num_tokens if generation.started_ns else None,
                cost_nano=to_nano(record.cost) if generation.started_ns else 0,
                since_s=self._clock.monotonic(),
                spent_keys=(reservation.spent_key,),
                remember=True,
            )
        )

    async def _keep(self, transcript: TranscriptRecord, generation: Generation) -> None:
        try:
            await self._insist(lambda: self._bus.outbox.publish(transcript), generation)
        except PayloadTooLargeError as error:
            logger.warning(
                "a transcript is too large to be kept",
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
        """None once it is stored; otherwise why the bus will never take it."""
        try:
            await self._insist(lambda: self._bus.results.store(result), generation)
        except PayloadTooLargeError as error:
            return error
        return None

    async def _insist(self, step: Callable[[], Awaitable[None]], generation: Generation) -> None:
        """Try until it succeeds. Raises what trying again cannot change."""

        async def confirmed_step() -> None:
            standing = await self._confirm(generation)
            if standing is not Standing.HELD:
                raise _NotOursError(standing)
            await step()

        def on_failure(error: Exception, delay_s: float) -> None:
            if delay_s == _FIRST_BACKOFF_S:
                logger.warning(
                    "the end of a request waits for the bus",
                    extra={"request_id": generation.request_id, "reason": str(error)},
                )

        delays = doubling_delays(_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S)
        await retry(confirmed_step, delays, self._clock.sleep, on_failure=on_failure)
