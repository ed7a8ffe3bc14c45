"""Sends one job to one worker, continuing what an earlier run began."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from enum import Enum, auto
from typing import NamedTuple

from msgspec.structs import replace

from scheduler.dispatch.context import Parts
from scheduler.jobs.entry import Entry
from scheduler.jobs.poison_pills import MAX_FAILURES
from scheduler.jobs.terminal_status import Verdict, cancelled, failed, refused
from schemas.control import Cancel, CancelReason, Dispatch, WorkerReply
from schemas.errors import PayloadTooLargeError

# How long a run waits for what the one before it took, of a worker that is there to tell: it does
# so when its step is over.
_LAST_WORD_TIMEOUT_S = 0.06

logger = logging.getLogger(__name__)


class Result(Enum):
    """What became of a dispatch."""

    ACCEPTED = auto()  # the worker holds the lease
    REFUSED = auto()  # nothing ran: another worker, or later
    LOST = auto()  # no answer: it may run there
    ANSWERED = auto()  # an earlier run had ended it already
    OVERTAKEN = auto()  # somebody else runs it at a higher epoch
    POISONOUS = auto()  # workers die of it
    ENDS = auto()  # it must not run: see the verdict


class Sent(NamedTuple):
    result: Result
    verdict: Verdict | None = None
    reason: str = ""


class Sender:
    """Speaks to workers, gateways and the index about one job; what follows is the lane's to do."""

    def __init__(self, parts: Parts) -> None:
        self._bus = parts.bus
        self._config = parts.config
        self._clock = parts.clock
        self._generations = parts.generations
        self._fleet = parts.fleet

    async def is_known(self, entry: Entry) -> bool:
        """Whether the index says that it ran before."""
        return await self._generations.lookup(entry.request_id) is not None

    async def last_holder(self, entry: Entry) -> str | None:
        """The worker that ran a job last as far as the index knows, "" for nobody; None: it is
        answered already. The next epoch will be above the known one."""
        known = await self._generations.lookup(entry.request_id)
        if known is None:
            return ""
        entry.epoch_floor = max(entry.epoch_floor, known.epoch)
        if not known.finished:
            entry.lives.found(known.epoch, known.worker_id)
        return None if known.finished else known.worker_id

    async def send(self, entry: Entry, worker_id: str) -> Sent:
        """Dispatch to a worker; a job that ran before is taken away from whoever still runs it.

        Raises BusUnavailableError: nothing was sent.
        """
        epoch_before = entry.epoch
        if not entry.ran_before:
            entry.begin_run(self._clock.monotonic())
            return await self._dispatch(entry, worker_id, epoch_before)
        if await self.last_holder(entry) is None:
            return Sent(Result.ANSWERED)
        if not await self._bus.jobs.is_open(entry.stream_sequence):
            return Sent(Result.ANSWERED)
        entry.begin_run(self._clock.monotonic())
        await self._supersede(entry)
        return await self._continue(entry, worker_id, epoch_before)

    async def continue_at(self, entry: Entry, worker_id: str) -> Sent:
        """Dispatch to the worker that is thought to run the job still: it goes on with it under
        the new lease. Raises BusUnavailableError: nothing was sent."""
        epoch_before = entry.epoch
        entry.begin_run(self._clock.monotonic())
        sent = await self._continue(entry, worker_id, epoch_before)
        if sent.result is Result.ENDS:
            await self._supersede(entry)
        return sent

    async def _supersede(self, entry: Entry) -> None:
        """Whoever runs it at an older epoch stops, and leaves the lease alone."""
        entry.claimed_epoch = entry.epoch
        await self._bus.control.cancel(
            Cancel(
                request_id=entry.request_id,
                reason=CancelReason.SUPERSEDED,
                below_epoch=entry.epoch,
            )
        )

    async def _continue(self, entry: Entry, worker_id: str, epoch_before: int) -> Sent:
        """Dispatch from where the client is."""
        job = entry.job
        point = None
        if job.reply:
            point = await self._bus.control.resume_point(
                job.reply, job.request_id, self._config.resume_timeout_s
            )
            if point is not None and not point.open:
                return Sent(Result.ENDS, cancelled(CancelReason.DISCONNECT))
            # There are no tokens of an embedding to resume behind, whatever the client says.
            read = () if point is None else point.token_ids
            entry.resume_token_ids = read if job.pooling is None else ()
        awaited = entry.lives.awaited_worker_id
        if awaited not in ("", worker_id) and self._fleet.get(awaited) is not None:
            await entry.lives.hear(_LAST_WORD_TIMEOUT_S)
        if entry.suspicion.detector is not None and await self._is_poisonous(
            entry, is_heard=point is not None
        ):
            return Sent(Result.POISONOUS)
        entry.num_delivered = len(entry.resume_token_ids)
        return await self._dispatch(entry, worker_id, epoch_before)

    async def _is_poisonous(self, entry: Entry, *, is_heard: bool) -> bool:
        """Whether workers die of it, as far as can be told once all that one held have spoken."""
        suspicion, detector = entry.suspicion, entry.suspicion.detector
        assert detector is not None
        went_on = len(entry.resume_token_ids) > entry.num_delivered
        # That no gateway answers says nothing about the job; nobody listens to some.
        is_unknown = bool(entry.job.reply) and not is_heard
        detector.report(suspicion, progressed=went_on or is_unknown)
        if suspicion.failures > 0 and not detector.closed.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2 * self._config.resume_timeout_s):
                    await detector.closed.wait()
        return suspicion.failures >= MAX_FAILURES

    async def _dispatch(self, entry: Entry, worker_id: str, epoch_before: int) -> Sent:
        job = entry.job
        if entry.trace is not None:
            traceparent = entry.trace.sent(entry.epoch, len(entry.resume_token_ids))
            job = replace(job, traceparent=traceparent)
        sent_ns = self._clock.now_ns()
        entry.lives.end(sent_ns)
        dispatch = Dispatch(
            job=job,
            epoch=entry.epoch,
            lease=entry.lease,
            resume_token_ids=entry.resume_token_ids,
            lives=entry.lives.before(worker_id),
            sent_ns=sent_ns,
            reservation=entry.reservation,
        )
        try:
            reply = await self._bus.control.command(
                worker_id, dispatch, self._config.dispatch_timeout_s
            )
        except PayloadTooLargeError as error:
            return Sent(Result.ENDS, refused(error))
        sent = _read(reply)
        if sent.result is Result.REFUSED:
            entry.undo_run(epoch_before)
        elif sent.result in (Result.ACCEPTED, Result.LOST):
            is_taken = sent.result is Result.ACCEPTED
            entry.lives.sent(entry.epoch, worker_id, sent_ns, is_taken=is_taken)
        if sent.result is not Result.ACCEPTED:
            logger.info(
                "a dispatch did not take",
                extra={
                    "request_id": entry.request_id,
                    "worker_id": worker_id,
                    "epoch": entry.epoch,
                    "result": sent.result.name.lower(),
                    "reason": sent.reason,
                },
            )
        return sent


def _read(reply: WorkerReply | None) -> Sent:
    if reply is None:
        return Sent(Result.LOST)
    if reply.ok:
        return Sent(Result.ACCEPTED)
    match reply.reason:
        case "full" | "draining":
            return Sent(Result.REFUSED, reason=reply.reason)
        case "stale_epoch":
            return Sent(Result.OVERTAKEN, reason=reply.reason)
        case "bad_request":
            verdict = failed("bad_request", reply.message, retryable=False)
            return Sent(Result.ENDS, verdict, reply.reason)
        case _:
            return Sent(Result.LOST, reason=reply.reason)
