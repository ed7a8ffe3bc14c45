"""Run of one request of a batch: queued as often as needed, and answered from the results of its
jobs.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from millrace.bus.api import Bus
from millrace.bus.transport import Subscription
from millrace.gateway.batches.input import InputLine, read_line
from millrace.gateway.batches.lines import BatchEndpoint, BatchOrder, LineAttempt
from millrace.gateway.batches.log import BatchLog
from millrace.gateway.batches.store import BatchRecord, PublishedLine
from millrace.gateway.core import Gateway
from millrace.gateway.errors import InternalError, Refusal, refusal_of
from millrace.runtime.clock import Clock
from millrace.runtime.retry import doubling_delays
from millrace.runtime.tasks import wait_or_sleep
from millrace.schemas.batches.batches import BatchLine, LineResponse
from millrace.schemas.errors import BusUnavailableError, MillraceError, QueueFullError
from millrace.schemas.jobs import Job, JobResult
from millrace.schemas.records import Status

logger = logging.getLogger(__name__)

_DOOR = "/v1/batches"
_RETRY_S = 1.0
_LONGEST_RETRY_S = 30.0
_OK = 200
_TOO_MANY_REQUESTS = 429
_QUEUE_SHARE = 0.5
_NS_PER_S = 1_000_000_000
_FIRST_POLL_S = 0.1
_POLL_S = 5.0
_EAGER_S = 0.05
_NUM_EAGER = 10
_LOST_AFTER_S = 60.0


class LineRunner:
    """Runner of one batch's lines, each by ``run``, until ``stopping`` is set.

    ``is_taken_over``: another gateway may have published a line without logging it.
    """

    def __init__(
        self,
        gateway: Gateway,
        record: BatchRecord,
        kind: BatchEndpoint,
        log: BatchLog,
        results: ResultWaiter,
        stopping: asyncio.Event,
        *,
        is_taken_over: bool,
    ) -> None:
        self._gateway = gateway
        self._batch_id = record.batch.id
        self._caller = record.caller
        self._deadline_ns = record.batch.expires_at * _NS_PER_S
        self._kind = kind
        self._log = log
        self._results = results
        self._stopping = stopping
        self._is_taken_over = is_taken_over

    async def run(self, line: InputLine) -> None:
        """Run a line. On return the line is finished in the log, or the batch was stopped before
        the line ran.
        """
        try:
            await self._run(line)
        except MillraceError:
            raise
        except Exception:
            # A bug that one request triggers must not keep the others from being answered.
            logger.exception(
                "a request of a batch has failed",
                extra={"batch_id": self._batch_id, "line": line.number},
            )
            refusal = refusal_of(InternalError("The gateway failed to answer this request."))
            self._refuse(line, read_line(line), refusal)

    async def _run(self, line: InputLine) -> None:
        request = read_line(line)
        known = self._log.in_queue.get(line.number)
        attempt = 0 if known is None else known.attempt
        while True:
            named = LineAttempt(self._batch_id, line.number, attempt)
            try:
                order = await self._order(request, named)
                if order is None:
                    return
                if known is None:
                    known = await self._publish(line, order, attempt)
                if known is None:
                    return
            except MillraceError as error:
                refusal = refusal_of(error)
                self._gateway.refusals.note(_DOOR, refusal, self._caller, named.request_id)
                self._refuse(line, request, refusal)
                return
            results = await self._wait(order, known)
            order.settle(results)
            if len(results) == len(order.jobs) and not _has(results, Status.SHED):
                await self._finish(line, request, order, results)
                return
            # The job has no result and never will: queue the request again under another id.
            self._log.in_queue.pop(line.number, None)
            known, attempt = None, attempt + 1
            if await self._stopped_within(_RETRY_S):
                return

    async def _order(self, request: BatchLine, attempt: LineAttempt) -> BatchOrder | None:
        """Return the jobs of a request; None if the batch is stopped first. Raises MillraceError
        for an invalid request.
        """
        for delay_s in doubling_delays(_RETRY_S, _LONGEST_RETRY_S):
            try:
                return await self._kind.order(
                    bytes(request.body),
                    self._caller,
                    attempt,
                    self._gateway.clock.now_ns(),
                    self._deadline_ns,
                )
            except MillraceError as error:
                if not error.retryable:
                    raise
            if await self._stopped_within(delay_s):
                break
        return None

    async def _publish(
        self, line: InputLine, order: BatchOrder, attempt: int
    ) -> PublishedLine | None:
        """Reserve limits and publish the jobs, retrying without a time limit. Return None if the
        batch is stopped first.

        Raises MillraceError for a permanent failure.
        """
        for delay_s in doubling_delays(_RETRY_S, _LONGEST_RETRY_S):
            if self._stopping.is_set():
                break
            try:
                await order.reserve()
                published = await self._publish_once(line, order, attempt)
            except MillraceError as error:
                if not error.retryable or _is_hopeless(error):
                    order.settle([])
                    raise
                wait_s = max(delay_s, getattr(error, "retry_after_s", None) or 0.0)
            else:
                self._log.note_published(published)
                return published
            await self._stopped_within(min(wait_s, _LONGEST_RETRY_S))
        order.settle([])
        return None

    async def _publish_once(
        self, line: InputLine, order: BatchOrder, attempt: int
    ) -> PublishedLine:
        self._leave_room(order.jobs[0].model)
        sequences = await asyncio.gather(*map(self._publish_job, order.jobs))
        return PublishedLine(line.number, attempt, tuple(sequences))

    async def _publish_job(self, job: Job) -> int:
        """Publish a job and return its stream sequence in NATS.

        A job that already has a result is not published; its sequence is 0.
        """
        bus = self._gateway.bus
        if self._is_taken_over and await bus.results.fetch(job.tenant, job.request_id) is not None:
            return 0
        return (await bus.jobs.publish(job, reserved=True)).stream_sequence

    async def _wait(self, order: BatchOrder, published: PublishedLine) -> list[JobResult]:
        """Return the results of the jobs that have any."""
        try:
            found = await asyncio.gather(
                *(
                    self._results.wait(job.request_id, sequence)
                    for job, sequence in zip(order.jobs, published.sequences, strict=True)
                )
            )
        except asyncio.CancelledError:
            if self._stopping.is_set():
                order.settle([])  # no gateway will read its results
            raise
        return [result for result in found if result is not None]

    def _leave_room(self, model: str) -> None:
        """Raise QueueFullError while the model's queue is half full: the rest is for interactive
        requests. Raise StoreFullError while the queue's store has no room.
        """
        self._gateway.stores.check()
        queue = self._gateway.fleet.queue(model)
        if queue is not None and queue.num_bounded >= queue.bound * _QUEUE_SHARE:
            raise QueueFullError("The queue is half full.", queue.retry_after_s)

    async def _finish(
        self, line: InputLine, request: BatchLine, order: BatchOrder, results: list[JobResult]
    ) -> None:
        if self._stopping.is_set() and (
            _has(results, Status.CANCELLED) or _has(results, Status.EXPIRED)
        ):
            return
        refusal = order.refusal(results)
        if refusal is None:
            try:
                body = await order.render(results)
            except MillraceError as error:
                refusal = refusal_of(error)
            else:
                answer = LineResponse(_OK, order.attempt.request_id, msgspec.Raw(body))
                self._log.note_answer(line, request, answer, ok=True)
                return
        self._gateway.failure_log.failed(
            _DOOR, refusal, self._caller.tenant, order.attempt.request_id
        )
        self._refuse(line, request, refusal)

    def _refuse(self, line: InputLine, request: BatchLine, refusal: Refusal) -> None:
        request_id = LineAttempt(self._batch_id, line.number).request_id
        answer = LineResponse(refusal.status, request_id, msgspec.Raw(refusal.body))
        self._log.note_answer(line, request, answer, ok=False)

    async def _stopped_within(self, seconds: float) -> bool:
        """Wait; return whether the batch was stopped meanwhile."""
        await wait_or_sleep(self._stopping, self._gateway.clock, seconds)
        return self._stopping.is_set()


def _has(results: list[JobResult], status: Status) -> bool:
    return any(result.status == status for result in results)


def _is_hopeless(error: MillraceError) -> bool:
    """Return whether the request alone exceeds a limit."""
    return error.http_status == _TOO_MANY_REQUESTS and getattr(error, "retry_after_s", None) is None


class ResultWaiter:
    """Waiter for a tenant's results.

    It is notified of each stored result. It polls for results that were stored before the
    subscription or during an outage: soon at first, then every 5 s. Owns its subscription;
    ``close`` ends it.
    """

    def __init__(self, bus: Bus, tenant: str, clock: Clock) -> None:
        self._bus = bus
        self._tenant = tenant
        self._clock = clock
        self._told: dict[str, asyncio.Event] = {}
        self._subscription: Subscription | None = None

    async def start(self) -> None:
        self._subscription = await self._bus.results.watch(self._tenant, self._on_stored)

    async def close(self) -> None:
        if self._subscription is not None:
            await self._subscription.close()

    async def wait(self, request_id: str, sequence: int) -> JobResult | None:
        """Return the result of the job with the queue sequence ``sequence``; None for a job that
        left the queue without a result, and will never have one.
        """
        told = self._told.setdefault(request_id, asyncio.Event())
        closed_at_s: float | None = None
        linger_s = _FIRST_POLL_S
        try:
            while True:
                now_s = self._clock.monotonic()
                try:
                    result = await self._fetch(request_id, eager=told.is_set())
                except BusUnavailableError:
                    result = None
                    closed_at_s = None if closed_at_s is None else now_s  # the store did not answer
                if result is not None:
                    return result
                if closed_at_s is not None and now_s > closed_at_s + _LOST_AFTER_S:
                    return None
                told.clear()
                await wait_or_sleep(told, self._clock, linger_s)
                if told.is_set():
                    continue
                linger_s = min(2 * linger_s, _POLL_S)
                if linger_s == _POLL_S and closed_at_s is None and await self._is_gone(sequence):
                    # The consumer that took the job from the queue may be about to store its
                    # result.
                    closed_at_s = self._clock.monotonic()
        finally:
            del self._told[request_id]

    def _on_stored(self, request_id: str) -> None:
        told = self._told.get(request_id)
        if told is not None:
            told.set()

    async def _fetch(self, request_id: str, *, eager: bool) -> JobResult | None:
        """Fetch a result. ``eager``: it was just sent to the store and must arrive in a moment.

        Raises BusUnavailableError.
        """
        for _ in range(_NUM_EAGER if eager else 1):
            result = await self._bus.results.fetch(self._tenant, request_id)
            if result is not None or not eager:
                return result
            await self._clock.sleep(_EAGER_S)
        return None

    async def _is_gone(self, sequence: int) -> bool:
        """Return whether the job has left the queue; False while the bus is unavailable."""
        try:
            return not await self._bus.jobs.is_open(sequence)
        except BusUnavailableError:
            return False
